"""What runs beside slurmctld: read the spool, decide requeue, drain or hold, act, verify."""

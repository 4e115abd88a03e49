"""What runs on the nodes: hooks that Slurm calls, probes they run, records they leave.

Imports nothing of ``recovery``, and nothing heavy at the top: a Prolog delays every job.
"""

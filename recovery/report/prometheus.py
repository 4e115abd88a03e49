"""Figures in Prometheus' text format, for node_exporter's textfile collector or a scrape.

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from recovery.effort import Fleet

_PREFIX = "slurm_recovery_"


def fleet(figures: Fleet) -> str:
    """Return the metrics of all jobs together; what is not known is left out."""
    one = figures.to_dict()["fleet"]
    lines: list[str] = []
    for name, kind, what, value in (
        ("jobs", "gauge", "Jobs with a decision.", one["jobs"]),
        ("failures", "gauge", "Attempts of them that failed.", one["failures"]),
        (
            "gpu_seconds_allocated",
            "gauge",
            "GPU-seconds of their attempts.",
            one["gpu_seconds_allocated"],
        ),
        (
            "gpu_seconds_replay",
            "gauge",
            "GPU-seconds of work done again, where known.",
            one["gpu_seconds_replay"],
        ),
        (
            "gpu_seconds_downtime",
            "gauge",
            "GPU-seconds between attempts.",
            one["gpu_seconds_downtime"],
        ),
        (
            "effective_training_time_ratio",
            "gauge",
            "Productive share of allocated time and downtime, at most.",
            one["effective_training_time_ratio"],
        ),
        (
            "mean_time_to_failure_seconds",
            "gauge",
            "Seconds that attempts ran, for each failure.",
            one["mean_seconds_to_failure"],
        ),
        (
            "mean_time_to_recovery_seconds",
            "gauge",
            "Seconds from a failure to the next attempt's start.",
            one["mean_seconds_to_recovery"],
        ),
    ):
        if value is not None:
            lines += _metric(name, kind, what, {"": value})
    by_outcome = {f'{{outcome="{name}"}}': count for name, count in sorted(one["outcomes"].items())}
    if by_outcome:
        lines += _metric("jobs_by_outcome", "gauge", "Jobs by what became of them.", by_outcome)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, what: str, values: Mapping[str, float]) -> Iterable[str]:
    yield f"# HELP {_PREFIX}{name} {what}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
    for labels, value in values.items():
        yield (
            f"{_PREFIX}{name}{labels} {value:.6g}"
            if isinstance(value, float)
            else (f"{_PREFIX}{name}{labels} {value}")
        )

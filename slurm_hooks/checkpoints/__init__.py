"""Checkpoints: which is the newest complete one, at which step, and why newer ones do not count.

``find`` is the door. One module for each format or trainer says when one of its own is complete;
``reading`` bounds what they may read, ``pickles`` reads pickles without executing them.
"""

from slurm_hooks.checkpoints.find import find
from slurm_hooks.checkpoints.reading import Limits
from slurm_hooks.checkpoints.verdict import Checkpoint, Verdict

__all__ = ["Checkpoint", "Limits", "Verdict", "find"]

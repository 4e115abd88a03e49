"""The example configuration is what a newcomer copies: it must load, and change nothing."""

from __future__ import annotations

from pathlib import Path

from slurm_hooks.config import Config, load

EXAMPLE = Path(__file__).parent.parent / "examples" / "recovery.toml"


def test_the_example_says_what_holds_without_it() -> None:
    assert load(EXAMPLE) == Config()

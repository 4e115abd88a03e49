"""docs/findings.md says what the catalogue says."""

from __future__ import annotations

from pathlib import Path

from slurm_hooks.catalog.document import document

PAGE = Path(__file__).parent.parent / "docs" / "findings.md"


def test_the_page_of_findings_is_the_catalogues() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "run scripts/docs"

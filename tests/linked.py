"""Copies of bundles that tests may change."""

import os
from pathlib import Path


def linked(bundle: Path, copy: Path) -> Path:
    """A copy of hard links; a file that is to be changed must be unlinked first."""
    for path in bundle.rglob("*"):
        if path.is_file() and path.name != "validation.json":
            target = copy / path.relative_to(bundle)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    return copy

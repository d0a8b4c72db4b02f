"""What clients call a model: the same in every service that is given the same folder."""

from __future__ import annotations

import os
from pathlib import Path


def served_name(folder: str | Path, given: str = "") -> str:
    """given: what it is to be called, "" for the folder's own name. A link is called by its own name, not by what it leads to."""
    return given or os.path.basename(os.path.abspath(folder))

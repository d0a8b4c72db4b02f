"""Names the folder of libraries that tests prebuild as images do. One build serves all tests of the same sources."""

from __future__ import annotations

from pathlib import Path

COMPILED = Path(__file__).resolve().parents[2] / "build" / "kernels" / "prebuilt"

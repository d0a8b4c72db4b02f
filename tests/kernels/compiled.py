"""Names the folder in which tests keep libraries that they prebuild as images do; one build serves all tests of the same
sources.
"""

from __future__ import annotations

from pathlib import Path

COMPILED = Path(__file__).resolve().parents[2] / "build" / "kernels" / "prebuilt"

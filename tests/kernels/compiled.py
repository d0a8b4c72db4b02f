"""Names the folder of libraries that tests prebuild like the images do. All tests of the same sources use one build."""

from __future__ import annotations

from pathlib import Path

COMPILED = Path(__file__).resolve().parents[2] / "build" / "kernels" / "prebuilt"

"""Where tests keep what they compile of the C++ kernels as images do: once for all of the same sources."""

from __future__ import annotations

from pathlib import Path

COMPILED = Path(__file__).resolve().parents[2] / "build" / "kernels" / "prebuilt"

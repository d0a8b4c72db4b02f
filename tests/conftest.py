"""Where there is no GPU, Triton's interpreter runs its kernels: chosen when triton is first imported, by whatever test."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

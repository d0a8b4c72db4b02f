"""python -m services.cli: the same program as `rootstock`."""

from __future__ import annotations

import sys

from services.cli.program import main

if __name__ == "__main__":
    sys.exit(main())

"""python -m rootstock_llm.services.cli: the same program as `rootstock`."""

from __future__ import annotations

import sys

from rootstock_llm.services.cli.program import main

if __name__ == "__main__":
    sys.exit(main())

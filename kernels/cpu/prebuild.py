"""python -m rootstock_llm.kernels.cpu.prebuild: builds the C++ kernels for each class of CPUs of this architecture.

The libraries are in the folder `prebuilt`. The build of a container image runs this command, because the image has no compiler
and may run on any CPU of its architecture.
"""

from __future__ import annotations

import argparse
import sys

from rootstock_llm.kernels.cpu.build import PREBUILT, BuildFailed, buildable, prebuild


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m rootstock_llm.kernels.cpu.prebuild", description=(__doc__ or "").partition(": ")[2]
    ).parse_args()
    PREBUILT.mkdir(parents=True, exist_ok=True)
    try:
        for variant in buildable():
            print(prebuild(variant, PREBUILT))
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

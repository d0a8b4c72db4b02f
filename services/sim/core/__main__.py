"""python -m rootstock_llm.services.sim.core TRACE | generate KIND | fit SOURCE, or `rootstock sim`. Each has --help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rootstock_llm.services.sim.core import fit_command, generate_command, run_command
from rootstock_llm.services.sim.core.report.timeline import NoPicture
from rootstock_llm.services.sim.core.run.simulation import SimulationError
from rootstock_llm.services.worker.exec.contracts.protocol import ExecutorError

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"generate": generate_command.main, "fit": fit_command.main}


def main(argv: Sequence[str]) -> int:
    command = COMMANDS.get(argv[0]) if argv else None
    try:
        if command is not None:
            command(argv[1:])
        else:
            run_command.main(argv)
    except (ValueError, OSError, ExecutorError, SimulationError, NoPicture) as error:
        print(f"rootstock sim: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

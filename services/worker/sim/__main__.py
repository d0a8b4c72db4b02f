"""python -m services.worker.sim TRACE | generate KIND | fit SOURCE. Each has --help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from services.worker.exec.protocol import ExecutorError
from services.worker.sim import fit_command, generate_command, run_command
from services.worker.sim.simulation import SimulationError
from services.worker.sim.timeline import NoPicture

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"generate": generate_command.main, "fit": fit_command.main}


def main(argv: Sequence[str]) -> int:
    command = COMMANDS.get(argv[0]) if argv else None
    try:
        if command is not None:
            command(argv[1:])
        else:
            run_command.main(argv)
    except (ValueError, OSError, ExecutorError, SimulationError, NoPicture) as error:
        print(f"services.worker.sim: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""python -m tests.benchmarks.request_trace_runner FOLDER MODULE [FLAGS]: runs the module of a service and counts its calls.

`tests.benchmarks.request_trace` starts this module and prepares FOLDER:

- FOLDER/window holds the current window.
- FOLDER/python is a script that replaces `sys.executable`. So each child that the module starts as
  `python -m rootstock_llm.services.NAME` is counted too.
- FOLDER/socket accepts a connection of each counted process. The process waits for one byte and then sends its counts as a
  line of JSON. A file would not work, because the tokenizer's rendering process may not write files.

Protobuf runs in its Python implementation, because a profile function does not see constructions in the C implementation.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import socket
import sys
import threading
from pathlib import Path

from tests.benchmarks.call_counts import ProcessCounts, WindowFile

ROOT = Path(__file__).resolve().parents[2]
WINDOW, SCRIPT, SOCKET = "window", "python", "socket"  # names in the folder
SCRIPT_TEXT = """#!/bin/sh
case "$1 $2" in
"-m rootstock_llm.services."*) module=$2; shift 2
  exec {python} -m tests.benchmarks.request_trace_runner {folder} "$module" "$@" ;;
*) exec {python} "$@" ;;
esac
"""


def write_script(folder: Path) -> Path:
    """Writes the script that replaces the Python interpreter in counted processes, and returns its path."""
    script = folder / SCRIPT
    script.write_text(SCRIPT_TEXT.format(python=shlex.quote(sys.executable), folder=shlex.quote(str(folder))))
    script.chmod(0o755)
    return script


def _send_when_asked(connection: socket.socket, counts: ProcessCounts, module: str) -> None:
    with connection:
        if connection.recv(1):  # empty if request_trace has ended
            found = {"module": module, "functions": counts.functions(), "types": counts.types(module)}
            connection.sendall(json.dumps(found).encode() + b"\n")


def main() -> None:
    folder, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    sys.executable = str(folder / SCRIPT)
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    counts = ProcessCounts(WindowFile(folder / WINDOW), ROOT)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(folder / SOCKET))
    threading.Thread(target=_send_when_asked, args=(connection, counts, module), daemon=True).start()  # is not counted
    counts.start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

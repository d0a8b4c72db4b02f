"""Runs the blocks of a page from top to bottom in a fresh checkout of the repository."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.docs_commands.blocks import ROOT, Block
from tests.interrupts import hear_interrupts

PORT = 8000
BLOCK_S = 600.0  # time limit of a block in seconds
NIGHTLY_S = 3 * 3600.0  # time limit of a nightly block in seconds
START_S = 300.0
STOP_S = 60.0
NOT_COPIED = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build")
MASKS = {  # texts that differ from run to run → their replacement
    r"\b(chatcmpl|cmpl|resp|file|batch|msg|conv)[-_][\w-]+": "ID",
    r"\b[\d.,]+ (ms|s|min)\b": "TIME",
    r"\brsk-[\w-]+": "SECRET",
    r"\b[0-9a-f]{32,}\b": "DIGEST",
}


class BlockFailed(Exception):
    """Raised if a block fails, or if its output lacks the lines that the page shows."""


def port_is_free() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) != 0


class PageRun:
    """A run of one page. Owns the page's folder and its server, and removes both on exit."""

    def __init__(self, nightly: bool) -> None:
        self._nightly = nightly
        self._server: subprocess.Popen[bytes] | None = None
        self._serving = ""  # command of the running server
        self._printed = ""  # output of the last block
        self._temporary = tempfile.TemporaryDirectory(prefix="rootstock-docs-")
        self.folder = Path(self._temporary.name) / "rootstock"
        self._environment = {**os.environ, "PYTHONPATH": str(self.folder)}

    def __enter__(self) -> PageRun:
        make_checkout(self.folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop_server()
        self._temporary.cleanup()

    def run(self, block: Block) -> bool:
        """Runs the block, or compares an output block with the last output. Returns False if the block was not run or compared.

        Raises:
            BlockFailed: the block failed, or the output differs.
        """
        if block.mark == "output":
            return self._compare(block)
        self._printed = ""
        if block.mark != "run" and not (block.mark == "nightly" and self._nightly):
            return False
        if "with make run" in block.options:
            self._serve(f"make run {block.options['with make run']}".strip(), block)
        if "serves" in block.options:
            self._serve(block.text, block)
        elif "ends after" in block.options:
            self._run_until_interrupted(block)
        else:
            self._run_to_end(block)
        return True

    def _argv(self, block: Block) -> list[str]:
        if block.language == "python" or "by" in block.options:
            script = self.folder / "build" / "block.py"
            script.parent.mkdir(exist_ok=True)
            script.write_text(block.text)
            return [block.options.get("by", ".venv/bin/python"), str(script)]
        if block.language == "js":
            script = self.folder / "build" / "node" / "block.mjs"
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(block.text)
            return ["node", str(script)]
        return ["bash", "--norc", "-euo", "pipefail", "-c", block.text]

    def _run_to_end(self, block: Block) -> None:
        limit = NIGHTLY_S if block.mark == "nightly" else BLOCK_S
        given = block.options.get("input", "").encode() + b"\n"
        with tempfile.TemporaryFile() as out, self._started(block, out) as process:
            try:
                process.communicate(given, timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise BlockFailed(f"{block.place} did not end within {limit:.0f} s") from None
            out.seek(0)
            self._printed = out.read().decode(errors="replace")
        if process.returncode:
            raise BlockFailed(f"{block.place} ended with status {process.returncode}:\n{block.text}\n{self._printed[-4000:]}")

    def _run_until_interrupted(self, block: Block) -> None:
        seconds = float(block.options["ends after"].removesuffix(" s"))
        with tempfile.TemporaryFile() as out, self._started(block, out) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
                _wait_or_kill(process)
            out.seek(0)
            self._printed = out.read().decode(errors="replace")
        if (process.returncode > 0 and process.returncode != 128 + signal.SIGINT) or not self._printed:
            raise BlockFailed(f"{block.place} failed or printed nothing before Ctrl-C:\n{block.text}\n{self._printed[-4000:]}")

    def _started(self, block: Block, out: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._argv(block),
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=out,  # type: ignore[call-overload]
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_interrupts,
        )

    def _serve(self, command: str, block: Block) -> None:
        """Starts the server of the command unless this server already runs. First stops another server of the page."""
        if self._serving == command and self._server is not None and self._server.poll() is None:
            return
        self._stop_server()
        if not port_is_free():
            raise BlockFailed(f"{block.place} needs port {PORT}, which another process uses. End this process first.")
        log = self.folder / "build" / "server.log"
        log.parent.mkdir(exist_ok=True)
        argv = ["bash", "--norc", "-euo", "pipefail", "-c", command]
        with log.open("wb") as out:
            self._server = subprocess.Popen(
                argv,
                cwd=self.folder,
                env=self._environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=hear_interrupts,
            )
        self._serving = command
        begun, limit = time.monotonic(), NIGHTLY_S if self._nightly else START_S
        while not _is_ready():
            if self._server.poll() is not None or time.monotonic() - begun > limit:
                output = log.read_text(errors="replace")[-4000:]
                raise BlockFailed(f"{block.place}: the server did not become ready:\n{command}\n{output}")
            time.sleep(0.2)

    def _stop_server(self) -> None:
        server, self._server, self._serving = self._server, None, ""
        if server is None:
            return
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGINT)  # the signal of Ctrl-C in a terminal
        _wait_or_kill(server)

    def _compare(self, block: Block) -> bool:
        """Compares the last output with the page. Returns False if the last block has no output, or if no block prints this text.

        Raises:
            BlockFailed: the output lacks lines that the page shows.
        """
        if block.detail or not self._printed:
            return False
        if not is_printed(block.text, self._printed):
            raise BlockFailed(f"{block.place} shows\n{block.text}\nbut the block before it printed\n{self._printed[-4000:]}")
        return True


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a process that got Ctrl-C. Kills its process group after STOP_S seconds."""
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_printed(shown: str, printed: str) -> bool:
    """Returns whether the output contains the page's text, either exactly or after masking (MASKS). `…` matches any text."""
    return any(_is_part(change(shown), change(printed)) for change in (lined, masked))


def _is_part(shown: str, printed: str) -> bool:
    return re.search(".*?".join(map(re.escape, shown.split("…"))), printed, re.DOTALL) is not None


def lined(text: str) -> str:
    """Returns the text without trailing blanks in lines, and without blank lines at both ends."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def masked(text: str) -> str:
    for pattern, word in MASKS.items():
        text = re.sub(pattern, word, text)
    return lined(text)


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readiness", timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def make_checkout(folder: Path) -> None:
    """Copies the repository's files with their modification times. Links the environment and the compiled kernels."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    if (ROOT / ".venv").exists():
        (folder / ".venv").symlink_to((ROOT / ".venv").resolve())
    kernels = ROOT / "build" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "build").mkdir()
    (folder / "build" / "kernels").symlink_to(kernels)


def read_only(block: Block) -> str:
    """Checks a block that cannot run here: the syntax of YAML, or the syntax and the subcommands of shell commands.

    Returns:
        The fault, or "" if there is none.
    """
    if block.language == "yaml":
        return _read_yaml(block.text)
    if block.language in ("js", "promql"):
        return ""
    checked = subprocess.run(["bash", "--norc", "-n"], input=block.text, capture_output=True, text=True, check=False)
    if checked.returncode:
        return checked.stderr.strip()
    unknown = sorted(_unknown_subcommands(block.text))
    return f"has no such subcommand: {unknown[0]}" if unknown else ""


SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {
    "helm": ("diff", "get", "history", "install", "repo", "rollback", "template", "test", "uninstall", "upgrade"),
    "kubectl": (
        *("apply", "create", "delete", "describe", "exec", "get", "label", "logs", "port-forward", "proxy", "rollout"),
        *("set", "wait", "scale", "patch", "annotate", "cp"),
    ),
    "kind": ("create", "delete", "load"),
    "docker": ("build", "push", "compose"),
    "skaffold": ("dev", "run"),
}
# Matches a command's program and subcommand. Flags with a value may precede the subcommand.
SUBCOMMAND = re.compile(rf"(?m)(?:^|[|&;(]|\bdo\b|\bthen\b)[ \t]*({'|'.join(SUBCOMMANDS)})(?:[ \t]+-\w[ \t]+\S+)*[ \t]+([a-z-]+)")


def _unknown_subcommands(text: str) -> set[str]:
    """Returns `program subcommand` for each command line whose subcommand is not in SUBCOMMANDS."""
    found = set()
    for program, subcommand in SUBCOMMAND.findall(text):
        if subcommand not in SUBCOMMANDS[program]:
            found.add(f"{program} {subcommand}")
    return found


def _read_yaml(text: str) -> str:
    import yaml

    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        return str(error)
    return "" if documents and all(isinstance(document, dict) for document in documents) else "is no mapping"

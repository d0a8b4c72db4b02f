"""The program of the compiling process, which compiler_child.py starts.

It loads xgrammar and the vocabulary once, then forks a child for each grammar. A child translates the client's grammar into the
input of xgrammar's compiler, compiles it and runs a trial. Alarms and memory limits end a child that loops, allocates too much or
overflows its stack. The next child starts in milliseconds with clean memory. Messages:

  setup     {"limits": fields of GrammarLimits, "jumps"}, one frame with the vocabulary → {"ready": true}
  a grammar one byte with a socket attached; over that socket {"kind", "source", "parts", "cpu_s", "wall_s", "niceness"}
            → {"error": null or one line, "part" or "is_tag"}, and without an error one frame: the text that was compiled

The worker then compiles this text in its own process, because the child has shown that this is safe and cheap. The child does not
send the compiled grammar, because xgrammar serializes it to a hundred times its size (440 MB for a schema of 500 properties). The
compiling process has a single thread, because a fork of a process with several threads is not safe. It ends when its stdin ends.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xgrammar

from rootstock_llm.services.shared.json_schema import too_large
from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarPart, GrammarSpec
from rootstock_llm.services.worker.grammar.compile.frames import receive_frame, receive_message, send_frame, send_message
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import GrammarCompiler, Prepared, warning_in
from rootstock_llm.services.worker.grammar.compile.grammar_limits import MIB, GrammarLimits
from rootstock_llm.services.worker.grammar.compile.trial import run_trial
from rootstock_llm.services.worker.grammar.schema import json_rules
from rootstock_llm.services.worker.grammar.schema.json_document import parse_json
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from rootstock_llm.services.worker.grammar.schema.regex_rules import regex_ebnf
from rootstock_llm.services.worker.grammar.schema.schema_rules import schema_grammar
from rootstock_llm.services.worker.grammar.schema.structural_tag import structural_tag

MAX_LOG_BYTES = 1 << 20  # largest size of the log that replaces a child's stderr
SESSION_NICENESS = 5  # niceness of this process's session (autogroup); it gets a quarter of a core that another session also uses
AUTOGROUP = Path("/proc/self/autogroup")
MAX_RECURSION = 2000  # largest depth of xgrammar's recursive descent, on a stack of 8 MiB


@dataclass(frozen=True, slots=True)
class Inherited:
    """The data that each child inherits through fork()."""

    limits: GrammarLimits
    compiler: GrammarCompiler
    tokens: tuple[bytes, ...]  # bytes of each token of the model


def serve() -> None:
    """Forks a child for each grammar that arrives over the socket on stdin. Returns when the socket is closed."""
    control = socket.socket(fileno=os.dup(0))
    setup = receive_message(control)
    info = xgrammar.TokenizerInfo.deserialize_json(receive_frame(control).decode())
    inherited = Inherited(GrammarLimits(**setup["limits"]), GrammarCompiler(info, setup["jumps"]), tuple(info.decoded_vocab))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    xgrammar.set_max_recursion_depth(MAX_RECURSION)
    with contextlib.suppress(OSError):  # there is no such file if the kernel does not divide CPU time between sessions
        AUTOGROUP.write_text(str(SESSION_NICENESS))
    send_message(control, {"ready": True})
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if fds:
            _fork(inherited, fds[0], control)


def _fork(inherited: Inherited, fd: int, control: socket.socket) -> None:
    if os.fork():
        os.close(fd)
        return
    status = 1
    try:
        control.close()
        os.close(0)
        _serve(inherited, socket.socket(fileno=fd))
        status = 0
    finally:
        os._exit(status)  # without the exit hooks, which the child has inherited from its parent and must not run


def _serve(inherited: Inherited, link: socket.socket) -> None:
    """Compiles one grammar and sends the result. The limits of CPU time and wall time start when the request has arrived."""
    request = receive_message(link)
    spec = GrammarSpec(GrammarKind(request["kind"]), request["source"], tuple(GrammarPart(*part) for part in request["parts"]))
    for alarm, timer, seconds in (
        (signal.SIGPROF, signal.ITIMER_PROF, request["cpu_s"]),
        (signal.SIGALRM, signal.ITIMER_REAL, request["wall_s"]),
    ):
        signal.signal(alarm, signal.SIG_DFL)  # the default action ends the process, even during a call of xgrammar
        signal.setitimer(timer, seconds)
    os.setpriority(os.PRIO_PROCESS, 0, max(request["niceness"], os.getpriority(os.PRIO_PROCESS, 0)))
    log = _limit_resources(inherited.limits)
    try:
        prepared = _compile(inherited, spec, log)
    except GrammarRefused as refused:
        send_message(link, {"error": str(refused), "part": refused.part})
    except (MemoryError, RecursionError):
        send_message(link, {"error": f"{spec.label}: needs too much memory to compile", "part": None})
    else:
        send_message(link, {"error": None, "is_tag": prepared.is_tag})
        send_frame(link, prepared.text.encode())


def _compile(inherited: Inherited, spec: GrammarSpec, log: int) -> Prepared:
    prepared = prepare(spec)
    try:
        compiled = inherited.compiler.compile(prepared)
    except GrammarRefused as refused:
        raise GrammarRefused(f"{spec.label}: {refused}") from None
    warning = warning_in(os.pread(log, MAX_LOG_BYTES, 0).decode(errors="replace"))
    if warning:
        raise GrammarRefused(f"{spec.label}: {warning}")
    if compiled.size > inherited.limits.compiled_mib * MIB:
        raise GrammarRefused(f"{spec.label}: larger than {inherited.limits.compiled_mib} MiB when compiled")
    run_trial(compiled, inherited.tokens, inherited.limits)
    return prepared


def prepare(spec: GrammarSpec) -> Prepared:
    """Checks a grammar and translates it for xgrammar. Runs in a child, because a malicious grammar may make this slow.

    Raises:
        GrammarRefused: the grammar is malformed, not supported or too large.
    """
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        _check_size(parse_json(spec.source, spec.kind), spec.label)
        return Prepared(True, structural_tag(spec.source, spec.parts))
    return Prepared(False, ebnf_of(spec))


def ebnf_of(spec: GrammarSpec) -> str:
    """Returns EBNF text with a rule named root. Raises GrammarRefused."""
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return json_rules.finished({}, {}, json_rules.OBJECT).render()
        case GrammarKind.JSON_SCHEMA:
            return schema_grammar(_check_size(parse_json(spec.source, "json_schema"), spec.kind)).render()
        case GrammarKind.REGEX:
            return regex_ebnf(spec.source)
        case GrammarKind.EBNF:
            return spec.source
        case GrammarKind.STRUCTURAL_TAG:
            raise ValueError("a structural tag has no EBNF")


def _check_size(document: Any, kind: str) -> Any:
    """Returns the document unchanged, or raises GrammarRefused if the document is too large."""
    why = too_large(document)
    if why:
        raise GrammarRefused(f"{kind}: {why}")
    return document


def _limit_resources(limits: GrammarLimits) -> int:
    """Limits the memory and the file sizes of this child.

    Returns:
        The file descriptor of a log in memory that replaces stderr; xgrammar writes its warnings there.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + limits.memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_LOG_BYTES, MAX_LOG_BYTES))
    log = os.memfd_create("grammar-log")
    os.dup2(log, sys.stderr.fileno())
    return log

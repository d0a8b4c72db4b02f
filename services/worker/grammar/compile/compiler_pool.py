"""Compiles grammars: first as a trial in a child process, then in this process if the trial succeeded.

Owns the compiling process and the threads that wait for it.

Two queues keep fast grammars from waiting behind slow grammars. `workers` threads serve the quick queue; each compilation there
may take quick_s. A grammar that needs longer starts again in the slow queue. One thread serves the slow queue; each compilation
there may take compile_s of CPU time. Each queue serves the tenants in turn.

The children that compile have a lower CPU priority than the worker. The children of the slow queue have the lowest priority. On a
busy machine, a child may get little CPU time. The slow queue therefore limits CPU time, so that a grammar is not refused because
other processes were busy. After WALL_FACTOR * compile_s of wall time, the grammar is refused.

The threads have the priority of the worker. On a busy machine, a thread of low priority would get little CPU time while it has
the interpreter lock, and would then delay all other threads of the worker.

Linux may divide CPU time between sessions first (autogroups), and niceness then counts only within a session. The compiling
process has its own session, so that it starts in seconds although other services keep all cores busy. After its start, it lowers
the priority of its session, which would otherwise get as much CPU time as all services of the worker's session.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path

import rootstock_llm
from rootstock_llm.services.worker.core.contracts.grammar import GrammarSpec, Reason
from rootstock_llm.services.worker.grammar.compile.frames import receive_frame, receive_message, send_frame, send_message
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled, GrammarCompiler, Prepared
from rootstock_llm.services.worker.grammar.compile.grammar_limits import GrammarLimits
from rootstock_llm.services.worker.grammar.compile.vocabulary import Vocabulary
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused

# Niceness of the children that compile the grammars of each queue; the worker's niceness is 0. Beside a busy thread of the worker
# on the same core, a compilation gets a quarter (quick queue) or a tenth (slow queue) of the CPU time.
QUICK_NICENESS, SLOW_NICENESS = 5, 10
ROOT = Path(rootstock_llm.__file__).resolve().parents[1]  # the folder that contains rootstock_llm
START_S = 120.0  # time limit in seconds of the start of the compiling process; on an idle machine, it takes a few seconds
JOIN_S = 2.0  # longest wait in seconds for each thread in close()
MARGIN_S = 2.0  # seconds that this process waits longer than the child's own alarm, which normally ends the child
DYING_S = 0.2  # longest wait in seconds for a process to be reapable after its sockets have closed
WALL_FACTOR = 10.0  # limit of the wall time in the slow queue, in multiples of compile_s
QUEUE_FULL = "too many grammars are waiting to be compiled; retry later"
QUEUE_TENANTS = 4  # a queue's capacity, in multiples of one tenant's capacity
Done = Callable[[GrammarSpec, Compiled | None, str, bool], None]  # spec, compiled, reason, busy
logger = logging.getLogger(__name__)


class CompilerGone(Exception):
    """The compiling process has ended or cannot be started. The grammar may be valid; a client may retry."""


class _TooSlow(Exception):
    """The compilation took longer than its queue allows."""


class CompilerPool:
    """Compiles submitted grammars on threads, which wait for the compiling process.

    done(spec, compiled, reason, busy) is called on one of the threads for every submitted spec, unless the pool is closed. `busy`
    means that the pool is overloaded or broken, and that the grammar may be valid.
    """

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, done: Done, jumps: bool) -> None:
        """Starts the threads.

        Args:
            jumps: whether grammars are also compiled for bytes, to find text that a grammar determines.
        """
        self._library = _Library(vocabulary, jumps)
        self._limits = limits
        self._done = done
        self._fork_server = _ForkServer(self._library.vocabulary, limits, jumps)
        self._quick, self._slow = FairQueue(limits.queue), FairQueue(limits.queue)
        self._closed = False
        self._timeouts_lock = threading.Lock()
        self.timeouts = 0  # number of grammars whose compilation took too long; guarded by _timeouts_lock
        queues = [(self._quick, limits.quick_s, QUICK_NICENESS)] * limits.workers
        queues.append((self._slow, limits.compile_s, SLOW_NICENESS))
        self._threads = [
            threading.Thread(target=self._serve, args=queue, name=f"grammar-{index}", daemon=True)
            for index, queue in enumerate(queues)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def compiler_pid(self) -> int | None:
        """Id of the process that forks compilers, or None while it is not running."""
        return self._fork_server.pid

    def submit(self, spec: GrammarSpec, tenant: bytes) -> bool:
        """Queues a grammar without waiting.

        Args:
            tenant: the tenant in whose queue the grammar waits; b"" is a tenant, too.

        Returns:
            False if too many grammars wait or the pool is closed. done() is then not called.
        """
        return self._quick.offer(spec, tenant)

    def warm_up(self) -> None:
        """Loads xgrammar and starts the compiling process, which takes seconds.

        If the process cannot be started, this is logged, and the first compilation tries again.
        """
        self._library.compiler()
        try:
            self._fork_server.ensure_running()
        except CompilerGone as gone:
            logger.warning("%s", gone)

    def close(self) -> None:
        """Kills the compiling process and its children, and waits up to JOIN_S for each thread."""
        self._closed = True
        self._fork_server.close()
        for queue in (self._quick, self._slow):
            queue.close()
        for thread in self._threads:
            thread.join(JOIN_S)  # a running compilation has ended, because its child was killed

    def _serve(self, queue: FairQueue, seconds: float, niceness: int) -> None:
        while (found := queue.take()) is not None:
            self._finish(*found, queue, seconds, niceness)

    def _finish(self, spec: GrammarSpec, tenant: bytes, queue: FairQueue, seconds: float, niceness: int) -> None:
        compiled, reason, busy = None, "", False
        try:
            compiled = self._compile(spec, min(seconds, self._limits.compile_s), niceness)
        except GrammarRefused as refused:
            reason = Reason(str(refused), refused.part)
        except CompilerGone as gone:
            reason, busy = f"{gone}; retry later", True
        except _TooSlow:
            if queue is self._slow or seconds >= self._limits.compile_s:
                with self._timeouts_lock:
                    self.timeouts += 1
                reason = f"{spec.label}: the compilation took longer than {self._limits.compile_s:g} s"
            elif self._slow.offer(spec, tenant):
                return
            else:
                reason, busy = f"{spec.label}: {QUEUE_FULL}", True
        except Exception:  # any other exception is a bug, which must not end the thread
            logger.exception("could not compile a grammar")
            reason = f"{spec.label}: an internal error, see the worker's log"
        if not self._closed:
            self._done(spec, compiled, reason, busy)

    def _compile(self, spec: GrammarSpec, seconds: float, niceness: int) -> Compiled:
        """Compiles a grammar. Retries once if the compiling process has ended."""
        try:
            return self._exchange(spec, seconds, niceness)
        except CompilerGone:
            if self._closed:
                raise
            return self._exchange(spec, seconds, niceness)

    def _exchange(self, spec: GrammarSpec, seconds: float, niceness: int) -> Compiled:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                forker = self._fork_server.fork_child(theirs)
            started = time.monotonic()
            wall_s = seconds if seconds < self._limits.compile_s else WALL_FACTOR * seconds
            ours.settimeout(wall_s + MARGIN_S)
            try:
                request = {"kind": spec.kind, "source": spec.source, "parts": [astuple(part) for part in spec.parts]}
                send_message(ours, {**request, "cpu_s": seconds, "wall_s": wall_s, "niceness": niceness})
                reply = receive_message(ours)
                text = receive_frame(ours).decode() if reply["error"] is None else ""
            except TimeoutError:
                raise _TooSlow from None
            except (OSError, EOFError):  # the child has ended; if it ran for `seconds` or longer, its time limit has ended it
                raise self._failure_of(spec, forker, time.monotonic() - started >= seconds) from None
        if reply["error"] is not None:
            raise GrammarRefused(reply["error"], part=reply["part"])
        return self._library.compiler().compile(Prepared(reply["is_tag"], text))

    def _failure_of(self, spec: GrammarSpec, forker: int, late: bool) -> Exception:
        if late:
            return _TooSlow()
        if not self._fork_server.is_alive(forker):
            return CompilerGone("the grammar compiler has ended")
        return GrammarRefused(f"{spec.label}: the compiler crashed: the grammar needs too much memory, or is nested too deep")


class _Library:
    """The grammar compiler in this process. xgrammar is loaded at the first use, because this takes seconds. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, jumps: bool) -> None:
        self._vocabulary = vocabulary
        self._jumps = jumps
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def vocabulary(self) -> bytes:
        """Returns the vocabulary in the form that the compiling process reads."""
        return self._vocabulary.info().serialize_json().encode()

    def compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._vocabulary.info(), self._jumps)
            return self._compiler


class _ForkServer:
    """The process that forks a child for each compilation. It is started at the first use and restarted after its end.

    Thread-safe.
    """

    def __init__(self, vocabulary: Callable[[], bytes], limits: GrammarLimits, jumps: bool) -> None:
        """Stores the setup without starting the process.

        Args:
            vocabulary: returns the serialized vocabulary; called at each start of the process.
            jumps: whether grammars are also compiled for bytes.
        """
        self._vocabulary = vocabulary
        self._setup = {"limits": asdict(limits), "jumps": jumps}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def is_alive(self, pid: int) -> bool:
        """Returns whether the compiling process has this id and is alive.

        Waits up to DYING_S for the end of this process, because an exiting process closes its sockets before it can be reaped.
        """
        with self._lock:
            if self._process is None or self._process.pid != pid:
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(DYING_S)
            return self._process.poll() is None

    def fork_child(self, link: socket.socket) -> int:
        """Forks a child that serves the socket `link`. Returns the id of the process that forks. Raises CompilerGone."""
        with self._lock:
            if self._closed:
                raise CompilerGone("the grammar compiler is stopping")
            for _ in range(2):  # if the first attempt finds that the process has ended, the second attempt starts it again
                control = self._ensure_started()
                try:
                    socket.send_fds(control, [b"g"], [link.fileno()])
                    assert self._process is not None
                    return self._process.pid
                except OSError:
                    self._kill()
        raise CompilerGone("the grammar compiler has ended")

    def ensure_running(self) -> None:
        """Starts the process if it is not running. Raises CompilerGone."""
        with self._lock:
            if not self._closed:
                self._ensure_started()

    def close(self) -> None:
        self._closed = True
        # Called without the lock, because a thread that waits for a hanging start has the lock. The kill ends that wait.
        self._kill_group()
        with self._lock:
            self._kill()

    def _ensure_started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            logger.warning("the grammar compiler ended with status %d", self._process.returncode)
            self._kill()
        if self._control is None:
            self._control = self._start()
        return self._control

    def _start(self) -> socket.socket:
        vocabulary = self._vocabulary()
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        try:
            with theirs:
                self._process = _start_compiler(theirs.fileno())
            send_message(ours, self._setup)
            send_frame(ours, vocabulary)
            receive_message(ours)
        except (OSError, EOFError) as error:
            ours.close()
            self._kill()
            raise CompilerGone(f"the grammar compiler does not start: {error}") from None
        return ours

    def _kill(self) -> None:
        """Kills the process and its children."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._kill_group()
            self._process.wait()
        self._control = self._process = None

    def _kill_group(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)  # the id is not reused before the process is reaped and its group is empty
        except ProcessLookupError:
            logger.debug("the grammar compiler's group was empty")


def _start_compiler(stdin: int) -> subprocess.Popen[bytes]:
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-m", "rootstock_llm.services.worker.grammar.compile.compiler_child"],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a traceback may quote the grammar
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), **single},  # the environment of this process is not inherited
        start_new_session=True,  # so that Ctrl-C does not end the child before the worker; killpg() also ends its children
    )


class FairQueue:
    """A queue of grammars that serves the tenants in turn. One tenant can use at most a quarter of the queue."""

    def __init__(self, most: int) -> None:
        self._most = most  # largest number of waiting grammars of one tenant
        self._waiting: OrderedDict[bytes, deque[GrammarSpec]] = OrderedDict()  # by tenant; the tenant to serve next is first
        self._size = 0
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, spec: GrammarSpec, tenant: bytes) -> bool:
        """Queues a grammar without waiting. Returns False if too many grammars wait or the queue is closed."""
        with self._changed:
            num_waiting = len(self._waiting.get(tenant, ()))
            if self._closed or num_waiting >= self._most or self._size >= self._most * QUEUE_TENANTS:
                return False
            self._waiting.setdefault(tenant, deque()).append(spec)
            self._size += 1
            self._changed.notify()
            return True

    def take(self) -> tuple[GrammarSpec, bytes] | None:
        """Waits for the next grammar. Returns None if the queue is closed."""
        with self._changed:
            while not self._size and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            tenant, specs = self._waiting.popitem(last=False)
            spec = specs.popleft()
            self._size -= 1
            if specs:
                self._waiting[tenant] = specs  # the tenant is served again after all other tenants
            return spec, tenant

    def close(self) -> None:
        """Closes the queue. Running and later calls of take() return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

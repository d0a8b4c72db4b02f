"""Tests compilation in processes that can be killed: limits, fairness, deaths, the cache by content, and hostile grammars."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rootstock_llm.services.shared.limits import MAX_GRAMMAR_BYTES
from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarPart, GrammarSpec
from rootstock_llm.services.worker.grammar.book import CompiledBook, UnusedGrammars
from rootstock_llm.services.worker.grammar.compile.compiler_pool import QUICK_NICENESS, SLOW_NICENESS
from rootstock_llm.services.worker.grammar.compile.forking_compiler import SESSION_NICENESS
from rootstock_llm.services.worker.grammar.compile.grammar_limits import MIB, GrammarLimits
from rootstock_llm.services.worker.grammar.compile.trial import allowed_ids
from rootstock_llm.services.worker.grammar.match.matcher import TOO_SLOW
from tests.grammar import model

HANG_GUARD_S = 90.0
LIMITS = GrammarLimits(compile_s=3.0, quick_s=0.6, memory_mib=256)
SLOW = "a?" * 3000 + "a" * 3000  # compiles for longer than all time limits here


@dataclass
class Messages:
    """Collects the messages of a CompiledBook. A message has a grammar, and "" or the reason for refusing this grammar."""

    received: queue.Queue[tuple[GrammarSpec, str]] = field(default_factory=queue.Queue)

    def ready(self, spec: GrammarSpec) -> None:
        self.received.put((spec, ""))

    def failed(self, spec: GrammarSpec, reason: str, busy: bool) -> None:
        assert busy == reason.endswith("retry later")
        self.received.put((spec, reason))

    def next(self) -> tuple[GrammarSpec, str]:
        return self.received.get(timeout=HANG_GUARD_S)


@contextmanager
def opened(limits: GrammarLimits, clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[CompiledBook, Messages]]:
    messages = Messages()
    book = CompiledBook(model.tokenizer(), model.vocabulary(), limits, messages.ready, messages.failed, clock=clock)
    try:
        yield book, messages
    finally:
        book.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[CompiledBook, Messages]]:
    with opened(LIMITS) as pair:
        yield pair


def regex(pattern: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, pattern)


def outcome(book: CompiledBook, messages: Messages, spec: GrammarSpec) -> str:
    """Opens a grammar and returns the reason for its refusal, or "" if it was compiled."""
    assert book.open(spec) is None
    reported, reason = messages.next()
    assert reported == spec
    return reason


def compiles(book: CompiledBook, messages: Messages, pattern: str) -> bool:
    spec = regex(pattern)
    if outcome(book, messages, spec):
        return False
    matcher = book.open(spec)
    return matcher is not None and bool(allowed_ids(matcher.mask(), 1280))


def test_ready_grammar_is_reported_by_a_message(shared: tuple[CompiledBook, Messages]) -> None:
    book, messages = shared
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    assert outcome(book, messages, spec) == ""
    first, second = book.open(spec), book.open(spec)
    assert first is not None and second is not None and first is not second
    (one,) = model.tokenizer().encode_batch(["1"], False)
    assert first.accept(one[0])
    assert not second.accept(model.EOS[0]), "each request has its own state of the grammar"


def test_nested_lookaheads_compile(shared: tuple[CompiledBook, Messages]) -> None:
    depth = 60
    assert compiles(*shared, f"^{'(?=' * depth}a+{')' * depth}[ab]*$")


def test_refusal_for_lack_of_memory_hides_a_structural_tag_that_a_gateway_made() -> None:
    schema = {"type": "string", "pattern": "(?=[ab]*c)" * 40 + "[abc]{1,900}"}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    spec = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), (GrammarPart("#/format"),))
    with opened(replace(LIMITS, memory_mib=1)) as (book, messages):
        reason = outcome(book, messages, spec)
    assert reason.startswith("the grammar: ") and "memory" in reason


@pytest.mark.by_day(one_in=2, seed=16)
@pytest.mark.parametrize(
    "spec, reason",
    [
        (regex("("), "pattern, position 1: a group is not closed"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"not": {}}'), "json_schema: #/not: this keyword is not supported"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, "{"), "json_schema: not JSON: "),
        (GrammarSpec(GrammarKind.EBNF, "root ::= x"), "ebnf: EBNF parser error at line 1"),
        (GrammarSpec(GrammarKind.STRUCTURAL_TAG, "{}"), "structural_tag: #: needs 'format'"),
    ],
)
def test_refusal_of_a_grammar_is_one_line(shared: tuple[CompiledBook, Messages], spec: GrammarSpec, reason: str) -> None:
    reported = outcome(*shared, spec)
    assert reported.startswith(reason)
    assert "\n" not in reported


def test_equal_grammars_are_compiled_once(shared: tuple[CompiledBook, Messages]) -> None:
    book, messages = shared
    for _ in range(5):
        assert book.open(regex("once[0-9]")) is None
    assert messages.next() == (regex("once[0-9]"), "")
    assert book.open(regex("once[0-9]")) is not None
    assert messages.received.empty()


def test_refusal_of_a_grammar_is_cached_for_a_limited_time() -> None:
    now = [0.0]
    with opened(LIMITS, clock=lambda: now[0]) as (book, messages):
        assert outcome(book, messages, regex("(")) != ""
        pid = book.pool.compiler_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # stops the compiler
        assert book.open(regex("(")) is None
        assert messages.received.get_nowait()[1].startswith("pattern")
        now[0] = LIMITS.failure_s + 1
        assert book.open(regex("(")) is None
        assert messages.received.empty(), "the refusal has expired, so the grammar is compiled again"
        os.kill(pid, signal.SIGCONT)
        assert messages.next()[1].startswith("pattern")


def test_refusal_is_cached_by_the_digest_of_the_grammar(shared: tuple[CompiledBook, Messages]) -> None:
    book, messages = shared
    before = set(book._failed)
    assert outcome(book, messages, regex("(" + "x" * 100_000)) != ""
    assert [len(key) for key in set(book._failed) - before] == [32]


def test_grammar_is_refused_after_a_matcher_has_exceeded_the_time_limit(shared: tuple[CompiledBook, Messages]) -> None:
    spec = ebnf('root ::= s\ns ::= s s | "a" | "b"')  # is expensive only for outputs longer than those of the trial
    book, messages = shared
    before = book.cached_bytes
    assert outcome(book, messages, spec) == ""
    assert book.cached_bytes > before
    matcher = book.open(spec)
    assert matcher is not None
    (token,) = model.tokenizer().encode_batch(["a"], False)[0]
    accepted = 0
    while matcher.accept(token):
        matcher.mask()
        matcher.forced()
        accepted += 1
        assert accepted < 2000
    assert matcher.fault == TOO_SLOW
    assert book.cached_bytes == before
    assert outcome(book, messages, spec) == f"ebnf: {TOO_SLOW}"


def test_grammar_can_be_retried_when_the_compiler_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(LIMITS) as (book, messages):
        with monkeypatch.context() as broken:
            broken.setattr("rootstock_llm.services.worker.grammar.compile.compiler_pool.sys.executable", "/bin/false")
            assert outcome(book, messages, regex("[0-9]")).endswith("retry later")  # the reason of a refusal with busy=True
        assert outcome(book, messages, regex("[0-9]")) == ""


def test_least_recent_and_unused_grammars_are_dropped_from_the_cache() -> None:
    time_s = [0.0]
    with opened(GrammarLimits(cache_mib=2, unused_mib=0, idle_s=60.0), lambda: time_s[0]) as (book, messages):
        specs = [GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "maxLength": 90 + n})) for n in range(6)]
        for spec in specs:
            assert outcome(book, messages, spec) == ""
            assert book.open(spec) is not None, "a grammar that is ready can be opened"
        assert book.cached_bytes <= 2 * MIB
        assert book.open(specs[-1]) is not None
        assert book.open(specs[0]) is None
        assert messages.next() == (specs[0], "")
        time_s[0] = 60.0
        assert not book.drop_unused() and book.open(specs[0]) is not None
        time_s[0] = 61.0
        assert book.drop_unused() and book.cached_bytes > 0, "the grammar that was used within idle_s stays"
        assert book.open(specs[0]) is not None and book.open(specs[-1]) is None
        assert messages.next() == (specs[-1], "")
        time_s[0] = 122.0
        dropping = UnusedGrammars(book, every_s=0.01).run()
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(dropping, 0.5))
        assert book.cached_bytes == 0


def test_too_long_grammar_is_refused_at_once(shared: tuple[CompiledBook, Messages]) -> None:
    book, messages = shared
    for source in ("x" * 10_000_000, "世" * (MAX_GRAMMAR_BYTES // 3 + 1)):
        assert book.open(regex(source)) is None
        assert messages.received.get_nowait()[1] == f"regex: longer than {MAX_GRAMMAR_BYTES} bytes"


def test_quick_grammar_does_not_wait_for_slow_grammars() -> None:
    with opened(GrammarLimits(compile_s=60.0, quick_s=0.3)) as (book, messages):
        assert compiles(book, messages, "warm")
        for n in range(6):
            assert book.open(regex(SLOW + str(n))) is None
        assert compiles(book, messages, "quick[0-9]")


def test_grammar_is_refused_as_busy_when_the_compiler_queue_is_full() -> None:
    with opened(GrammarLimits(queue=2, workers=1, compile_s=2.0, quick_s=1.0)) as (book, messages):
        compiled: list[tuple[float, int]] = []
        book.on_compiled = lambda seconds, chars: compiled.append((seconds, chars))
        assert compiles(book, messages, "warm")
        assert [(seconds > 0, chars) for seconds, chars in compiled] == [(True, 4)]
        specs = [regex(SLOW + str(n)) for n in range(8)]
        for spec in specs:
            assert book.open(spec) is None
        spec, reason = messages.next()
        assert spec in specs and "retry later" in reason


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def compiling(book: CompiledBook, spec: GrammarSpec) -> int:
    """Starts a compilation and returns the id of its process."""
    pid = book.pool.compiler_pid
    assert pid is not None
    wait_until(lambda: not children_of(pid))
    assert book.open(spec) is None
    wait_until(lambda: bool(children_of(pid)))
    return children_of(pid)[0]


def niceness_of_children(book: CompiledBook) -> list[int]:
    pid, found = book.pool.compiler_pid, []
    assert pid is not None
    for child in children_of(pid):
        with suppress(ProcessLookupError):
            found.append(os.getpriority(os.PRIO_PROCESS, child))
    return found


def is_running(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_killed_compiler_child_fails_only_one_grammar() -> None:
    with opened(GrammarLimits(quick_s=60, compile_s=60)) as (book, messages):
        assert compiles(book, messages, "warm")
        os.kill(compiling(book, regex(SLOW)), signal.SIGKILL)
        spec, reason = messages.next()
        assert spec == regex(SLOW) and "the compiler crashed" in reason
        assert compiles(book, messages, "after")


def test_time_while_a_compiler_child_is_stopped_does_not_count_as_cpu_time() -> None:
    spec = regex("a?" * 500 + "a" * 500)  # a second of CPU time
    with opened(replace(LIMITS, quick_s=LIMITS.compile_s)) as (book, messages):
        assert compiles(book, messages, "warm")
        child = compiling(book, spec)
        os.kill(child, signal.SIGSTOP)
        time.sleep(LIMITS.compile_s + 0.5)
        os.kill(child, signal.SIGCONT)
        assert messages.next() == (spec, "too expensive: computing the allowed next tokens takes too long"), (
            "the trial refuses the grammar, not the CPU limit"
        )


def test_killed_compiler_is_restarted() -> None:
    with opened(LIMITS) as (book, messages):
        assert compiles(book, messages, "warm")
        before = book.pool.compiler_pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        assert compiles(book, messages, "after")
        assert book.pool.compiler_pid != before


def test_warm_up_starts_the_compiler_process() -> None:
    with opened(LIMITS) as (book, messages):
        assert book.pool.compiler_pid is None
        book.pool.warm_up()
        pid = book.pool.compiler_pid
        assert pid is not None
        assert compiles(book, messages, "first")
        assert book.pool.compiler_pid == pid


def test_compiler_process_and_compiling_threads_have_the_niceness_of_the_worker() -> None:
    """With a high niceness, the compiler starts late on a busy machine, and a thread may have the interpreter lock for long."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with opened(LIMITS) as (book, messages):
        threads = [thread.native_id or 0 for thread in threading.enumerate() if thread.name.startswith("grammar-")]
        for pattern in ("first", "after its death"):
            assert compiles(book, messages, pattern)
            pid = book.pool.compiler_pid
            assert pid is not None
            assert {os.getpriority(os.PRIO_PROCESS, each) for each in (pid, *threads)} == {own}
            os.kill(pid, signal.SIGKILL)


def test_compiler_process_has_its_own_session_of_low_priority(shared: tuple[CompiledBook, Messages]) -> None:
    """Linux may divide CPU time between sessions first (autogroups). Otherwise, /proc/PID/autogroup is missing."""
    shared[0].pool.warm_up()
    pid = shared[0].pool.compiler_pid
    assert pid is not None and os.getsid(pid) == pid
    autogroup = Path(f"/proc/{pid}/autogroup")
    assert not autogroup.exists() or autogroup.read_text().split()[-2:] == ["nice", str(SESSION_NICENESS)]


@pytest.mark.parametrize(("quick_s", "niceness"), [(60.0, QUICK_NICENESS), (0.2, SLOW_NICENESS)], ids=["quick", "slow"])
def test_niceness_of_a_compilation_follows_its_queue(quick_s: float, niceness: int) -> None:
    with opened(GrammarLimits(quick_s=quick_s, compile_s=60)) as (book, messages):
        assert compiles(book, messages, "warm")
        compiling(book, regex(SLOW))
        wanted = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
        wait_until(lambda: wanted in niceness_of_children(book))


def test_compiler_start_is_retried_after_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with opened(LIMITS) as (book, messages):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", "/nowhere/python")
            book.pool.warm_up()
        assert "the grammar compiler does not start" in caplog.text
        assert compiles(book, messages, "later")


def test_closing_does_not_wait_when_the_start_of_the_compiler_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    with opened(LIMITS) as (book, _):
        warming = threading.Thread(target=book.pool.warm_up)
        warming.start()
        wait_until(lambda: book.pool.compiler_pid is not None)
    warming.join(HANG_GUARD_S / 2)
    assert not warming.is_alive()


def test_closing_ends_running_compilations_and_sends_no_messages() -> None:
    with opened(GrammarLimits(quick_s=60, compile_s=60)) as (book, messages):
        assert compiles(book, messages, "warm")
        pid = book.pool.compiler_pid
        assert pid is not None
        child = compiling(book, regex(SLOW))
    wait_until(lambda: not is_running(child))
    assert not is_running(pid)
    assert messages.received.empty()


def schema(value: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def ebnf(source: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.EBNF, source)


def nested_schema(levels: int) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, '{"items":' * levels + "true" + "}" * levels)


def doubling_references(levels: int) -> GrammarSpec:
    refs = [{"$ref": f"#/$defs/d{n + 1}"} for n in range(levels)]
    definitions = {f"d{n}": {"properties": {"a": ref, "b": ref}, "required": ["a", "b"]} for n, ref in enumerate(refs)}
    return schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "null"}}})


HOSTILE: dict[str, GrammarSpec] = {
    "nested plus": regex("(a+)+b"),
    "nested stars of the empty string": regex("((((a*)*)*)*)*b"),
    "overlapping options": regex("(a|a|aa)*(a|aa)*b"),
    "many dot stars": regex(".*" * 20 + "=x"),
    "1,000,000 repetitions": regex("(a{1000}){1000}"),
    "nested counts of options": regex("((a|b|ab){1,500}c?){1,500}"),
    "nth from the end": regex("(a|b)*a(a|b){25}"),
    "wide unicode classes": regex(r"[\u{1}-\u{10ffff}]{1,2000}[^\u{100}-\u{200}]{1,2000}"),
    "groups 10,000 deep": regex("(" * 10000 + "a" + ")" * 10000),
    "3,000 optional letters": regex(SLOW),
    "300,000 alternatives": regex("ab|" * 300_000 + "c"),
    "10 MB": regex("a" * 10_000_000),
    "a count of eleven digits": regex("a{99999999999}"),
    "JSON 10,000 deep": GrammarSpec(GrammarKind.JSON_SCHEMA, "[" * 10000 + "]" * 10000),
    "schema 10,000 deep": nested_schema(10000),
    "schema 60 deep": nested_schema(60),
    "references that double": doubling_references(40),
    "enum of 50,000": schema({"enum": [f"value {n}" for n in range(50_000)]}),
    "15,000 properties": schema({"properties": {f"property {n}": {"type": "string"} for n in range(15_000)}}),
    "a string of a billion": schema({"type": "string", "maxLength": 10**9}),
    "lists of long strings": schema({"items": {"items": {"type": "string", "maxLength": 500}, "maxItems": 5000}}),
    "a pattern that backtracks for ever": schema({"patternProperties": {"^(a+)+$": {}}, "properties": {"a" * 40 + "!": {}}}),
    "ambiguous": ebnf('root ::= root root | "a" | ""'),
    "more ambiguous": ebnf("root ::= s\ns ::= s s s | s s | [a-z]"),
    "2^64 of nothing": ebnf(
        "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(64)) + '\nr64 ::= "y" | ""'
    ),
    "left recursion": ebnf('root ::= root "a" | "b"'),
    "itself": ebnf("root ::= root"),
    "a chain of 20,000 rules": ebnf(
        "root ::= r0\n" + "\n".join(f'r{n} ::= r{n + 1} | r{n + 1} "x"' for n in range(20_000)) + '\nr20000 ::= "y"'
    ),
    "EBNF 10,000 deep": ebnf("root ::= " + "(" * 10000 + '"a"' + ")" * 10000),
    "one letter for ever": ebnf('root ::= "a" root'),
    "ten million by count": regex("(?:a{100000}){100}"),
    "bytes": ebnf("\x00\x01 garbage ((("),
    "stars of free text": GrammarSpec(
        GrammarKind.STRUCTURAL_TAG,
        json.dumps({"format": {"type": "star", "content": {"type": "star", "content": {"type": "any_text"}}}}),
    ),
}  # fmt: skip
MUST_FAIL = frozenset({"10 MB", "groups 10,000 deep", "JSON 10,000 deep", "schema 10,000 deep", "itself", "bytes"})


def test_hostile_grammars_are_refused_or_stay_within_limits(shared: tuple[CompiledBook, Messages]) -> None:
    book, messages = shared
    names = {spec: name for name, spec in HOSTILE.items()}
    timeouts = book.pool.timeouts
    for spec in HOSTILE.values():
        assert book.open(spec) is None
    reasons = {}
    for _ in HOSTILE:
        spec, reason = messages.next()
        reasons[names[spec]] = reason
    assert reasons.keys() == HOSTILE.keys()
    assert book.pool.timeouts - timeouts == sum("took longer" in reason for reason in reasons.values()) > 0
    for name, reason in reasons.items():
        assert "\n" not in reason and len(reason) <= 400
        if not reason:
            assert name not in MUST_FAIL
            walk(book, HOSTILE[name])
    assert compiles(book, messages, "a normal one[0-9]+")


def walk(book: CompiledBook, spec: GrammarSpec) -> None:
    """Accepts the first allowed token up to 50 times. Fails if the matcher refuses a token without reporting a fault."""
    matcher = book.open(spec)
    assert matcher is not None, "the cache has space for all grammars"
    for _ in range(50):
        if matcher.terminated:
            return
        allowed = [token for token in allowed_ids(matcher.mask(), 1280) if token not in model.EOS]
        if not matcher.accept(allowed[0]):
            assert matcher.fault
            return
        matcher.forced()


def test_grammar_is_refused_when_no_matcher_can_be_made(
    shared: tuple[CompiledBook, Messages], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("made to fail")

    book, messages = shared
    assert compiles(book, messages, "odd") and compiles(book, messages, "good")
    with monkeypatch.context() as odd:
        odd.setattr("rootstock_llm.services.worker.grammar.book.XgrammarMatcher", broken)
        assert book.open(regex("odd")) is None
    assert "an internal error" in messages.next()[1]
    assert book.open(regex("good")) is not None
    assert outcome(book, messages, regex("odd")), "the refusal is remembered for failure_s"

"""Tests of the sentence about an ended process. Its sources are the exit code, the log, and the memory of the machine."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from rootstock_llm.services.local.ends import Memory, cause, num_memory_kills, why_it_ended

LOG = Path("run/worker-0.log")
MEMORY = Memory(model_bytes=1_500_000_000, free_bytes=900_000_000, kills=3)
NEEDS = "The model's weights take 1.50 GB, and 0.90 GB of memory was free at the start."
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n'


def record(level: str, message: str) -> str:
    return json.dumps({"level": level, "msg": message}) + "\n"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", ""),
        (record("info", "up") + record("error", "cannot serve: no weights") + record("info", "bye"), "no weights"),
        (record("info", "up") + TRACEBACK + "KeyError: 'a'\n", "KeyError: 'a'"),
        ("tokenizer: a/tokenizer.json: expected value\n", "tokenizer: a/tokenizer.json: expected value"),
        ("1:M 29 Nov 2026 10:00:00.001 * up\n1:M 29 Nov 2026 10:00:00.002 # Bad file format\n", "Bad file format"),
        (record("info", "up"), ""),
    ],
    ids=["empty", "error record", "traceback", "plain line", "redis", "no error"],
)
def test_cause_of_an_ended_process_is_the_last_error_in_the_log(output: str, said: str) -> None:
    assert cause(output) == said


@pytest.mark.parametrize(
    ("code", "output", "kills", "said"),
    [
        (1, record("error", "cannot serve: a is quantized"), 3, "worker-0 ended with status 1: a is quantized. Its log is"),
        (2, "", 3, "worker-0 ended with status 2. Its log is"),
        (-signal.SIGSEGV, "", 3, "worker-0 ended by SIGSEGV. Its log is"),
        (-signal.SIGKILL, "", 4, f"worker-0 was killed by the system because memory ran out. {NEEDS}"),
        (
            -signal.SIGKILL,
            "",
            3,
            f"worker-0 was killed by SIGKILL, for example by `kill -9` or because memory ran out. {NEEDS}",
        ),
        (1, TRACEBACK + "MemoryError\n", 3, f"worker-0 ended because memory ran out: MemoryError. {NEEDS}"),
        (
            1,
            record("error", "cannot serve: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            3,
            "worker-0 ended because memory ran out: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. "
            + NEEDS,
        ),
        (-signal.SIGABRT, "terminate called\n  what():  std::bad_alloc\n", 3, "worker-0 ended because memory ran out: what():"),
    ],
    ids=["refusal", "flags", "crash", "killed by the kernel", "killed", "python", "torch", "c++"],
)
def test_sentence_about_an_ended_process_has_the_exit_and_the_cause(code: int, output: str, kills: int, said: str) -> None:
    sentence = why_it_ended("worker-0", code, output, LOG, MEMORY, kills)
    assert sentence.startswith(said), sentence
    assert sentence.endswith(f"Its log is {LOG}.") and "\n" not in sentence


def test_sentence_about_an_ended_process_omits_the_model_when_the_process_has_no_weights() -> None:
    without = Memory(model_bytes=0, free_bytes=900_000_000, kills=3)
    assert why_it_ended("redis", -signal.SIGKILL, "", LOG, without, 3) == (
        f"redis was killed by SIGKILL, for example by `kill -9` or because memory ran out. Its log is {LOG}."
    )
    assert why_it_ended("redis", -signal.SIGKILL, "", LOG, without, 4) == (
        "redis was killed by the system because memory ran out. 0.90 GB of memory was free at the start."
        f" End other programs, or choose a smaller model. Its log is {LOG}."
    )


def test_number_of_memory_kills_is_the_counter_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 12\n")
    assert num_memory_kills(tmp_path / "vmstat") == 12 and num_memory_kills(tmp_path / "none") == 0

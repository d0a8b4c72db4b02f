"""Tests of resumed weights that differ: open gateway streams receive the new revision, and no old KV is served."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest

from rootstock_llm.protos import common_pb2, worker_pb2
from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.services.worker.exec.contracts.operations import Operation, ResumeMemory
from rootstock_llm.services.worker.identity.model_identity import ServedWeights
from rootstock_llm.services.worker.identity.sampling_defaults import sampling_defaults
from tests.services.worker.control.test_control_live import Operated, operated, run
from tests.services.worker.front.test_server import expected, submit
from tests.services.worker.identity.test_model_identity import SIZE, identity_of, make_folder, revision_of

PROMPT = list(range(20))
WEIGHTS = [pb.MEMORY_TAG_WEIGHTS]


def for_weights(handle: int, revision: str, **fields: object) -> worker_pb2.Submit:
    message = submit(handle, PROMPT)
    message.MergeFrom(worker_pb2.Submit(revision=revision, **fields))
    return message


def train(folder: Path) -> str:
    """Changes a byte in the middle of a weight file without a change of its size. Returns the new revision."""
    file = folder / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[SIZE // 2] ^= 1
    file.write_bytes(data)
    return revision_of(folder)


async def answered(at: Operated, message: worker_pb2.Submit) -> worker_pb2.Finish:
    await at.front.send(message)
    await at.front.ended(message.handle)
    return at.front.finishes[message.handle]


def served(folder: Path) -> ServedWeights:
    return ServedWeights(folder, identity_of(folder), partial(sampling_defaults, folder, True, ""))


async def release(at: Operated) -> None:
    await at.control.ReleaseMemory(pb.ReleaseMemoryRequest(tags=WEIGHTS))


async def resume(at: Operated) -> None:
    await at.control.ResumeMemory(pb.ResumeMemoryRequest())


def test_new_weights_are_announced_and_requests_for_the_old_weights_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    weights = served(folder)
    old = weights.identity.revision

    async def check() -> None:
        async with operated(weights=weights) as at:
            assert (await answered(at, for_weights(1, old))).cached_tokens == 0
            assert (await answered(at, for_weights(2, old))).cached_tokens > 0
            await at.worker.stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="s"))
            await release(at)
            new = train(folder)
            await resume(at)
            refused = await answered(at, for_weights(3, old, output_ids=[5, 6]))
            assert [hello.revision for hello in at.front.hellos] == [new] and new != old, "on the open stream, before all else"
            assert refused.error == common_pb2.ERROR_CODE_OTHER_WEIGHTS and not at.front.tokens[3]
            assert (await answered(at, for_weights(4, new))).cached_tokens == 0
            assert at.front.tokens[4] == expected(PROMPT, 10)
            assert (await answered(at, for_weights(5, ""))).cached_tokens > 0, "any weights"
            turn = await answered(at, for_weights(6, new, session=worker_pb2.SessionTurn(session_id="s")))
            assert turn.error == common_pb2.ERROR_CODE_INVALID_ARGUMENT and "it was forgotten" in turn.message
            assert (await at.state())["revision"] == new

    run(check)


def test_equal_weights_are_not_announced(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    weights = served(folder)
    assert weights.reload_s is None

    async def check() -> None:
        async with operated(weights=weights) as at:
            await release(at)
            os.utime(folder / "model-00001-of-00002.safetensors", (1, 1))
            await resume(at)
            assert not (await answered(at, for_weights(1, weights.identity.revision))).error
            assert not at.front.hellos
            assert weights.reload_s is not None and weights.reload_s >= 0

    run(check)


HOW: dict[str, tuple[str, Callable[[Path], object]]] = {
    "changed": ("model-00002-of-00002.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")),
    "lost": ("model-00002-of-00002.safetensors", Path.unlink),
    "with defaults that nobody can read": ("generation_config.json", lambda path: path.write_text("{")),
}


@pytest.mark.parametrize("how", HOW)
def test_weights_that_change_during_a_resume_are_not_served(tmp_path: Path, how: str) -> None:
    folder = make_folder(tmp_path / "model")
    weights = served(folder)
    applied: list[Operation] = []
    name, change = HOW[how]
    changed = folder / name
    kept = changed.read_bytes() if changed.exists() else b"{}"

    async def check() -> None:
        async with operated(weights=weights) as at:
            apply = at.worker.executor.apply

            def copying(operation: Operation) -> None:
                if isinstance(operation, ResumeMemory) and not any(isinstance(one, ResumeMemory) for one in applied):
                    change(changed)
                applied.append(operation)
                apply(operation)

            at.worker.executor.apply = copying  # type: ignore[method-assign]
            await release(at)
            code, details = await at.refusal(at.control.ResumeMemory(pb.ResumeMemoryRequest()))
            assert code is grpc.StatusCode.FAILED_PRECONDITION and changed.name in details
            assert applied[-1] == applied[0], "they are given back"
            assert (await at.state())["released"] == ["weights"]
            changed.write_bytes(kept)
            await resume(at)
            assert not (await answered(at, for_weights(1, weights.identity.revision))).error
            assert not at.front.hellos

    run(check)

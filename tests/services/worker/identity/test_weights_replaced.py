"""Tests of released weights whose files change before ResumeMemory: streams receive the new revision, and no old KV is served."""

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


def submit_for(handle: int, revision: str, **fields: object) -> worker_pb2.Submit:
    message = submit(handle, PROMPT)
    message.MergeFrom(worker_pb2.Submit(revision=revision, **fields))
    return message


def change_weights(folder: Path) -> str:
    """Changes a byte in the middle of a weight file without a change of its size. Returns the new revision."""
    file = folder / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[SIZE // 2] ^= 1
    file.write_bytes(data)
    return revision_of(folder)


async def finish_of(at: Operated, message: worker_pb2.Submit) -> worker_pb2.Finish:
    await at.gateway.send(message)
    await at.gateway.ended(message.handle)
    return at.gateway.finishes[message.handle]


def served_weights(folder: Path) -> ServedWeights:
    return ServedWeights(folder, identity_of(folder), partial(sampling_defaults, folder, True, ""))


async def release(at: Operated) -> None:
    await at.control.ReleaseMemory(pb.ReleaseMemoryRequest(tags=WEIGHTS))


async def resume(at: Operated) -> None:
    await at.control.ResumeMemory(pb.ResumeMemoryRequest())


def test_resume_of_changed_weights_sends_a_hello_and_refuses_requests_for_the_old_revision(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    weights = served_weights(folder)
    old = weights.identity.revision

    async def check() -> None:
        async with operated(weights=weights) as at:
            assert (await finish_of(at, submit_for(1, old))).cached_tokens == 0
            assert (await finish_of(at, submit_for(2, old))).cached_tokens > 0
            await at.worker.stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="s"))
            await release(at)
            new = change_weights(folder)
            await resume(at)
            refused = await finish_of(at, submit_for(3, old, output_ids=[5, 6]))
            assert [hello.revision for hello in at.gateway.hellos] == [new] and new != old, "a hello on the open stream"
            assert refused.error == common_pb2.ERROR_CODE_OTHER_WEIGHTS and not at.gateway.tokens[3]
            assert (await finish_of(at, submit_for(4, new))).cached_tokens == 0
            assert at.gateway.tokens[4] == expected(PROMPT, 10)
            assert (await finish_of(at, submit_for(5, ""))).cached_tokens > 0, "a submit without a revision runs on any weights"
            turn = await finish_of(at, submit_for(6, new, session=worker_pb2.SessionTurn(session_id="s")))
            assert turn.error == common_pb2.ERROR_CODE_INVALID_ARGUMENT and "it was closed" in turn.message
            assert (await at.state())["revision"] == new

    run(check)


def test_no_hello_message_is_sent_when_the_resumed_weights_are_equal(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    weights = served_weights(folder)
    assert weights.reload_s is None

    async def check() -> None:
        async with operated(weights=weights) as at:
            await release(at)
            os.utime(folder / "model-00001-of-00002.safetensors", (1, 1))
            await resume(at)
            assert not (await finish_of(at, submit_for(1, weights.identity.revision))).error
            assert not at.gateway.hellos
            assert weights.reload_s is not None and weights.reload_s >= 0

    run(check)


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "changed": ("model-00002-of-00002.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")),
    "lost": ("model-00002-of-00002.safetensors", Path.unlink),
    "invalid defaults": ("generation_config.json", lambda path: path.write_text("{")),
}


@pytest.mark.parametrize("case", CHANGES)
def test_weights_that_change_during_a_resume_are_not_served(tmp_path: Path, case: str) -> None:
    folder = make_folder(tmp_path / "model")
    weights = served_weights(folder)
    applied: list[Operation] = []
    name, change = CHANGES[case]
    changed = folder / name
    original = changed.read_bytes() if changed.exists() else b"{}"

    async def check() -> None:
        async with operated(weights=weights) as at:
            apply = at.worker.executor.apply

            def change_and_apply(operation: Operation) -> None:
                if isinstance(operation, ResumeMemory) and not any(isinstance(each, ResumeMemory) for each in applied):
                    change(changed)
                applied.append(operation)
                apply(operation)

            at.worker.executor.apply = change_and_apply  # type: ignore[method-assign]
            await release(at)
            code, details = await at.refusal(at.control.ResumeMemory(pb.ResumeMemoryRequest()))
            assert code is grpc.StatusCode.FAILED_PRECONDITION and changed.name in details
            assert applied[-1] == applied[0], "the worker releases the weights again"
            assert (await at.state())["released"] == ["weights"]
            changed.write_bytes(original)
            await resume(at)
            assert not (await finish_of(at, submit_for(1, weights.identity.revision))).error
            assert not at.gateway.hellos

    run(check)

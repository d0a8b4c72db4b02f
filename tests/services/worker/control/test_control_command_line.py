"""Tests of `python -m rootstock_llm.services.worker.control`: its arguments, its output in JSON and its one-line errors."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.worker.control.command_line import PARSERS, InvalidArguments
from rootstock_llm.services.worker.control.flags import OPERATIONS
from rootstock_llm.services.worker.control.server import start_control
from rootstock_llm.services.worker.control.servicer import BARRIERS
from tests.services.worker.control.address import control_at
from tests.services.worker.control.test_control_servicer import TOKEN, FakeLoop


async def shell(*words: str, token: str = "") -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of the command."""
    environment = {**os.environ, "ROOTSTOCK_CONTROL_TOKEN": token, "GRPC_VERBOSITY": "NONE"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rootstock_llm.services.worker.control", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_command_line_prints_responses_and_grpc_errors(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)

    async def run() -> None:
        at = control_at(port=free_ports(1)[0], token=TOKEN)
        server = await start_control(at, FakeLoop().put, "w", "m")
        assert server is not None
        address = ["--address", f"127.0.0.1:{server.port}"]
        by_file = [*address, "--control-token-file", str(tmp_path / "token")]
        results = await asyncio.gather(
            shell(*by_file, "FlushCache"),
            shell(*address, "SetInternalState", "policy=fcfs", "new_token_ratio=1", token=TOKEN),
            shell(*address, "FlushCache", token="wrong"),
            shell(*address, "ResumeMemory", token=TOKEN),
        )
        flushed, changed, unauthenticated, refused = results
        assert flushed == (0, '{\n  "pages": 12\n}\n', "")
        assert changed[0] == 0 and json.loads(changed[1])["tunables"]["policy"] == "fcfs"
        assert unauthenticated[:2] == (1, "") and unauthenticated[2].startswith("rootstock control: UNAUTHENTICATED: ")
        assert refused == (
            1,
            "",
            "rootstock control: FAILED_PRECONDITION: nothing to resume: no memory of this worker is released\n",
        )
        await server.stop(0)

    asyncio.run(run())


def test_command_line_prints_one_line_when_the_worker_is_unreachable() -> None:
    code, out, err = asyncio.run(shell("--address", f"127.0.0.1:{free_ports(1)[0]}", "FlushCache"))
    assert (code, out) == (1, "") and err.startswith("rootstock control: UNAVAILABLE: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["Explode"], "no operation Explode"),
        (["--control-token-file", "/nowhere", "FlushCache"], "cannot read control_token_file /nowhere"),
        (["--timeout-s", "0", "FlushCache"], "timeout_s"),
    ],
)
def test_command_line_exits_with_2_when_arguments_are_invalid(words: list[str], error: str) -> None:
    code, out, err = asyncio.run(shell(*words))
    assert (code, out) == (2, "") and error in err and "Traceback" not in err


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize(
    ("operation", "words", "request_"),
    [
        ("SetInternalState", ["a=true"], pb.SetInternalStateRequest(tunables={"a": pb.Value(flag=True)})),
        ("SetInternalState", ["a=-5"], pb.SetInternalStateRequest(tunables={"a": pb.Value(whole=-5)})),
        ("SetInternalState", ["a=0.5"], pb.SetInternalStateRequest(tunables={"a": pb.Value(real=0.5)})),
        ("SetInternalState", ["a=b=c"], pb.SetInternalStateRequest(tunables={"a": pb.Value(text="b=c")})),
        ("SetInternalState", ["a="], pb.SetInternalStateRequest(tunables={"a": pb.Value(text="")})),
        (
            "FlushCache",
            ["storage", "cache_salt=a=b", "older_than_s=60"],
            pb.FlushCacheRequest(tiers=["storage", "selected"], cache_salt="a=b", older_than_s=60),
        ),
        ("FlushCache", ["cache_salt="], pb.FlushCacheRequest(tiers=["selected"], cache_salt="")),
        ("SlowDown", [], pb.SlowDownRequest()),
        ("SlowDown", ["0.5"], pb.SlowDownRequest(step_delay_s=0.5)),
        ("Pause", [], pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT)),
        ("Pause", ["in_place"], pb.PauseRequest(mode=pb.PAUSE_MODE_IN_PLACE)),
        ("StartProfile", ["x"], pb.StartProfileRequest(name="x")),
        ("ReleaseMemory", ["weights"], pb.ReleaseMemoryRequest(tags=[pb.MEMORY_TAG_WEIGHTS])),
        ("ResumeMemory", [], pb.ResumeMemoryRequest()),
        ("SetLogLevel", ["debug"], pb.SetLogLevelRequest(level="debug")),
        ("TraceRequest", ["r1"], pb.TraceRequestRequest(request_id="r1")),
    ],
)
def test_command_line_arguments_are_parsed_into_a_request(operation: str, words: list[str], request_: object) -> None:
    assert PARSERS[operation](words) == request_


def test_value_that_is_no_number_and_no_boolean_is_read_as_text() -> None:
    request = PARSERS["SetInternalState"](["a=[1]", "b=null"])
    assert request == pb.SetInternalStateRequest(tunables={"a": pb.Value(text="[1]"), "b": pb.Value(text="null")})


@pytest.mark.by_day(one_in=2, seed=71)
@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("FlushCache", ["x"]),
        ("FlushCache", ["older_than_s=old"]),
        ("SetInternalState", []),
        ("SetInternalState", ["policy"]),
        ("SetInternalState", ["=1"]),
        ("SlowDown", ["fast"]),
        ("Pause", ["abort", "retract"]),
        ("Pause", ["unspecified_"]),
        ("ReleaseMemory", ["kv"]),
    ],
)
def test_parser_refuses_invalid_arguments(operation: str, words: list[str]) -> None:
    with pytest.raises(InvalidArguments):
        PARSERS[operation](words)


def test_every_operation_has_a_command_line_parser() -> None:
    assert set(PARSERS) == set(BARRIERS)
    assert all(operation in OPERATIONS for operation in BARRIERS)

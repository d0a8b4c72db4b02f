"""Tests of the Tokenizer service over gRPC on loopback: refusals, hostile templates, batches and output formats."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from rootstock_llm.protos import tokenizer_pb2 as pb
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.index.prefix_index import block_hashes, root_hash
from rootstock_llm.services.tokenizer import server
from tests.services.tokenizer.model_folders import byte_level
from tests.services.tokenizer.serving import Serving, serving

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
FAILED = grpc.StatusCode.FAILED_PRECONDITION
HELLO = json.dumps([{"role": "user", "content": "secret"}]).encode()


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), str(raised.value.details())


@pytest.mark.by_day(one_in=2, seed=30)
@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (pb.EncodeRequest(), INVALID, "texts"),
        (pb.EncodeRequest(texts=["x"] * (limits.MAX_BATCH_PROMPTS + 1)), EXHAUSTED, "texts"),
        (pb.EncodeRequest(texts=["secret" * 200]), EXHAUSTED, "texts"),
        (pb.EncodeRequest(texts=["x"], request_id="r" * 257), INVALID, "request_id"),
        (pb.EncodeRequest(texts=["x"], hash_root=b"1234567"), INVALID, "hash_root"),
        (pb.EncodeChatRequest(messages_json=HELLO, hash_root=b"123456789"), INVALID, "hash_root"),
        (pb.EncodeChatRequest(), INVALID, "messages"),
        (pb.EncodeChatRequest(messages_json=b"[secret"), INVALID, "messages"),
        (pb.EncodeChatRequest(messages_json=HELLO, tools_json=b"{}"), INVALID, "tools"),
        (pb.EncodeChatRequest(messages_json=HELLO, template_kwargs_json=b"[]"), INVALID, "template_kwargs"),
        (pb.EncodeChatRequest(messages_json=b" " * 7000), EXHAUSTED, "messages_json"),
        (
            pb.EncodeChatRequest(messages_json=json.dumps([{"role": "user", "content": "secret" * 200}]).encode()),
            EXHAUSTED,
            "messages",
        ),
        (pb.EncodeChatRequest(messages_json=b'[{"role": "user", "content": "secret\\ud800"}]'), INVALID, "messages"),
        (
            pb.EncodeChatRequest(messages_json=HELLO, continue_final_message=True, add_generation_prompt=True),
            INVALID,
            "continue_final_message",
        ),
    ],
)
def test_refusal_names_the_field_without_the_value(
    folders: dict[str, Path], request_: Any, code: grpc.StatusCode, field: str
) -> None:
    async def run() -> None:
        async with serving(folders["byte_level"], max_request_chars=1000) as service:
            is_chat = isinstance(request_, pb.EncodeChatRequest)
            got, details = await refusal((service.stub.EncodeChat if is_chat else service.stub.Encode)(request_))
            assert got == code and details.startswith(f"{field}: ") and "secret" not in details, details
            rpc = "EncodeChat" if is_chat else "Encode"
            assert service.metric("requests_total", rpc=rpc, code=code.name) == 1
            assert service.metric("in_flight") == 0

    asyncio.run(run())


def test_refusal_names_the_message_that_the_template_refuses(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.content == 'x' %}{{ raise_exception('No x.') }}{% endif %}{{ m.content }}{% endfor %}"
    )

    async def run() -> None:
        async with serving(byte_level(tmp_path / "m", template)) as service:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]
            call = service.stub.EncodeChat(pb.EncodeChatRequest(messages_json=json.dumps(messages).encode()))
            assert await refusal(call) == (INVALID, "messages[1]: No x.")

    asyncio.run(run())


LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% if j == -1 %}x{% endif %}{% endfor %}{% endfor %}"
HOSTILE = {
    "endless loop": (LOOP, EXHAUSTED),
    "range too long": ("{% for i in range(10**12) %}{% endfor %}", INVALID),
    "string bomb": ("{{ 'a' * 10**10 }}", EXHAUSTED),
    "list bomb": ("{{ ([0] * 10**10) | length }}", EXHAUSTED),
    "doubling": ("{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", EXHAUSTED),
    "endless output": ("{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxx{% endfor %}{% endfor %}", EXHAUSTED),
    "huge number": ("{{ 10 ** (messages | length * 10 ** 9) }}", EXHAUSTED),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", INVALID),
    "escape": ("{{ ''.__class__.__base__.__subclasses__() }}", INVALID),
}


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_does_not_stop_other_requests(tmp_path: Path, name: str) -> None:
    attack, code = HOSTILE[name]
    template = "{% if attack %}" + attack + "{% endif %}fine"

    async def run() -> None:
        async with serving(byte_level(tmp_path / "m", template), render_seconds=2.0, render_processes=2) as service:
            bad = service.stub.EncodeChat(pb.EncodeChatRequest(messages_json=HELLO, template_kwargs_json=b'{"attack": true}'))
            good = pb.EncodeChatRequest(messages_json=HELLO)
            for _ in range(3):
                assert len((await service.stub.EncodeChat(good)).prompts) == 1
            got, details = await refusal(bad)
            assert got == code and "secret" not in details, details
            assert len((await service.stub.EncodeChat(good)).prompts) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("template", "details"),
    [
        (None, "this model has no chat template"),
        ("{% if %}", "this model's chat template is broken: "),
        ("{{ x(" * 50_000, "this model's chat template is broken: "),
        ("{{ 10 ** (10 ** 9) }}", "this model's chat template is broken: "),
    ],
    ids=["none", "not Jinja", "nested too deeply", "endless compilation"],
)
def test_texts_are_encoded_when_the_chat_template_is_unusable(tmp_path: Path, template: str | None, details: str) -> None:
    async def run() -> None:
        async with serving(byte_level(tmp_path / "m", template), render_seconds=0.6) as service:
            code, got = await refusal(service.stub.EncodeChat(pb.EncodeChatRequest(messages_json=HELLO)))
            assert code == FAILED and got.startswith(details), got
            assert (await service.stub.Encode(pb.EncodeRequest(texts=["x"]))).prompts[0].ids

    asyncio.run(run())


def test_each_concurrent_request_gets_the_ids_of_the_right_text(folders: dict[str, Path]) -> None:
    texts = [f"hello {n} " * (n % 7 + 1) for n in range(200)]

    async def ids(service: Serving, n: int) -> list[int]:
        request = pb.EncodeRequest(texts=[texts[n]], add_special_tokens=n % 2 == 0)
        return list((await service.stub.Encode(request)).prompts[0].ids)

    async def run() -> None:
        async with serving(folders["wordpiece"]) as service:
            alone = [await ids(service, n) for n in range(20)]
            together = await asyncio.gather(*(ids(service, n) for n in range(200)))
            assert list(together[:20]) == alone
            assert service.metric("tokens_total") == sum(map(len, alone)) + sum(map(len, together))

    asyncio.run(run())


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("inline_tokens", [0, 1 << 20], ids=["in a thread", "on the loop"])
def test_response_has_block_hashes_when_the_request_has_a_root_hash(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, inline_tokens: int
) -> None:
    monkeypatch.setattr(server, "INLINE_TOKENS", inline_tokens)
    root = root_hash("model", "", "tokenizer", "")

    async def run() -> None:
        async with serving(folders["byte_level"]) as service:
            texts = ["hello there " * 100, "hello", "hello there " * 200]
            response = await service.stub.Encode(pb.EncodeRequest(texts=texts, hash_root=root))
            assert [prompt.block_hashes for prompt in response.prompts] == [block_hashes(root, p.ids) for p in response.prompts]
            long, short, longer = (prompt.block_hashes for prompt in response.prompts)
            assert not short and len(long) >= 8 and longer.startswith(long) and len(longer) > len(long)
            messages = json.dumps([{"role": "user", "content": texts[0]}]).encode()
            (chat,) = (await service.stub.EncodeChat(pb.EncodeChatRequest(messages_json=messages, hash_root=root))).prompts
            assert chat.block_hashes == block_hashes(root, chat.ids) != b""
            (plain,) = (await service.stub.Encode(pb.EncodeRequest(texts=texts[:1]))).prompts
            assert plain.ids == response.prompts[0].ids and not plain.block_hashes

    asyncio.run(run())


@pytest.mark.parametrize(("setting", "name"), [({}, "byte_level"), ({"served_model_name": "llama"}, "llama")])
def test_info_call_returns_the_served_model_name(folders: dict[str, Path], setting: dict[str, str], name: str) -> None:
    async def run() -> None:
        async with serving(folders["byte_level"], **setting) as service:
            assert (await service.stub.Info(pb.TokenizerInfoRequest())).model == name

    asyncio.run(run())


def test_service_renders_chats_after_cancelled_calls(tmp_path: Path) -> None:
    template = "{% if attack %}" + LOOP + "{% endif %}fine"

    async def run() -> None:
        async with serving(byte_level(tmp_path / "m", template), render_seconds=2.0, render_processes=1) as service:
            bad = pb.EncodeChatRequest(messages_json=HELLO, template_kwargs_json=b'{"attack": true}')
            for _ in range(2):
                call = service.stub.EncodeChat(bad)
                await asyncio.sleep(0.05)
                call.cancel()
            assert (await service.stub.EncodeChat(pb.EncodeChatRequest(messages_json=HELLO))).prompts
            assert service.metric("in_flight") == 0

    asyncio.run(run())


def test_rendering_process_imports_no_service_libraries() -> None:
    code = "import sys, rootstock_llm.services.tokenizer.render_child; print(sorted({n.split('.')[0] for n in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    assert not {"grpc", "pydantic", "tokenizers", "numpy", "google", "prometheus_client"} & set(json.loads(out.replace("'", '"')))


@pytest.mark.parametrize(
    ("settings", "tools", "reasoning"),
    [
        pytest.param({}, "hermes", "think", id="by the template"),
        pytest.param({"tool_call_parser": "none", "reasoning_parser": "none"}, "", "", id="none"),
        pytest.param(
            {"tool_call_parser": "mistral", "reasoning_parser": "mistral_think"}, "mistral", "mistral_think", id="named"
        ),
    ],
)
def test_info_call_returns_the_output_formats_of_the_model(
    folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any], tools: str, reasoning: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["byte_level"], folder)
    marks = "{% if tools %}<tool_call>{% endif %}{% if thought %}<think></think>{% endif %}"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" + marks + "!"
    (folder / "chat_template.jinja").write_text(template)

    async def run() -> None:
        async with serving(folder, **settings) as service:
            info = await service.stub.Info(pb.TokenizerInfoRequest())
            assert (info.tool_format, info.reasoning_format) == (tools, reasoning)
            assert not info.reasoning_marks, "the vocabulary has only one of the two marks"
            assert (await service.stub.EncodeChat(pb.EncodeChatRequest(messages_json=HELLO))).rendered_end == "secret!"

    asyncio.run(run())

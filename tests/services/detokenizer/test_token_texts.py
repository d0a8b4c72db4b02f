"""What single tokens look like, for every kind of tokenizer."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from rootstock.v1 import detokenizer_pb2 as pb
from services.detokenizer.token_texts import TokenTexts
from services.shared import limits
from services.shared.hf_tokenizer import HfTokenizer
from tests.services.detokenizer.test_server import serving
from tests.services.tokenizer.model_folders import KINDS

TEXT = "hello there, wie spät? 你好 def add(a, b):"


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("kind", KINDS)
def test_together_they_are_the_text(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    """Behind other text; at its start some tokenizers add a space, or drop one."""
    tokenizer = tokenizers[kind]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode_batch(["a " + TEXT], False)[0]
    joined = b"".join(texts.of(token) for token in ids).decode()
    assert joined.strip() == tokenizer.decode(ids, False).strip()


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "wordpiece"])
def test_special_tokens_give_their_names(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    special = min(tokenizer.special_ids)
    assert TokenTexts(tokenizer).of(special).decode().strip() == tokenizer.decode([special], False).strip() != ""


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("kind", ["byte_level", "wordpiece"])
def test_unknown_ids_give_nothing(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    assert TokenTexts(tokenizers[kind]).of(10**6) == b""


def test_a_part_of_a_character_stays_bytes(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode_batch(["🙂"], False)[0]
    texts = [TokenTexts(tokenizer).of(token) for token in ids]
    assert len(texts) > 1 and b"".join(texts) == "🙂".encode()


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("inline_tokens", [0, 2048], ids=["in a thread", "on the loop"])
def test_over_grpc(tokenizers: dict[str, HfTokenizer], inline_tokens: int) -> None:
    async def run() -> None:
        tokenizer = tokenizers["byte_level"]
        async with serving(tokenizer, inline_tokens=inline_tokens) as (stub, _, _):
            answer = await stub.TokenTexts(pb.TokenTextsRequest(token_ids=[5, 6, 5]))
            texts = TokenTexts(tokenizer)
            assert list(answer.texts) == [texts.of(5), texts.of(6), texts.of(5)]
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.TokenTexts(pb.TokenTextsRequest(token_ids=[1] * (limits.MAX_TOKEN_TEXTS + 1)))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())

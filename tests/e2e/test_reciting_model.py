"""The reciting model (reciting_model.py) outputs its texts through the whole system, streamed and whole, in the given pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.reciting_model import END, PLAIN_TEMPLATE, selector, write_reciting_model
from tests.e2e.system import System

TEXTS = [
    "Hello.",
    ["One ", "two", " thr", "ee."],
    "line\n\n日本語 🙂 " + "a" * 120,
    "",
    '[TOOL_CALLS][{"name": "read"}] and <|python_tag|><|python_tag|>',
    "<think>\nWhy?\n</think>\n\nBecause.",
    *(f"text {number} of many" for number in range(200)),
]
PLAIN = range(4)  # texts without special tokens


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("reciting")
    write_reciting_model(folder / "model", TEXTS, PLAIN_TEMPLATE)
    with (
        System(folder / "logs", model=str(folder / "model"), max_total_tokens=8192) as system,
        openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def chat(text: int) -> dict[str, Any]:
    return {
        "model": "model",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Please {selector(text)} now!"}],
    }


@pytest.mark.parametrize("text", PLAIN)
def test_chat_recites_the_selected_text(client: openai.OpenAI, text: int) -> None:
    whole = client.chat.completions.create(**chat(text)).choices[0]
    chunks = [choice for chunk in client.chat.completions.create(stream=True, **chat(text)) for choice in chunk.choices]
    assert whole.message.content == "".join(chunk.delta.content or "" for chunk in chunks) == "".join(TEXTS[text])
    assert whole.finish_reason == chunks[-1].finish_reason == "stop"


def test_stream_of_the_reciting_model_has_the_given_pieces(client: openai.OpenAI) -> None:
    chunks = [choice for chunk in client.chat.completions.create(stream=True, **chat(1)) for choice in chunk.choices]
    ends = list(itertools.accumulate(len(chunk.delta.content or "") for chunk in chunks))
    assert set(ends) <= {0, *itertools.accumulate(map(len, TEXTS[1]))}, "every chunk must end at the end of a piece"


def test_completions_recite_every_text_with_special_tokens(client: openai.OpenAI) -> None:
    prompts = [f"Earlier {selector(0)}, now {selector(text)}: </think>" for text in range(len(TEXTS))]
    for first in range(0, len(prompts), 50):
        answer = client.completions.create(
            model="model",
            prompt=prompts[first : first + 50],
            max_tokens=200,
            temperature=1,
            extra_body={"skip_special_tokens": False},
        )
        expected = ["".join(text) + END for text in TEXTS[first : first + 50]]
        assert [choice.text for choice in answer.choices] == expected

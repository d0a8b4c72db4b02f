"""The demo model's training data for tools has the form that the gateway's chat template produces."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from types import ModuleType

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.e2e.system import DEMO, ROOT

SCENES = 200


@pytest.fixture(scope="module")
def tool_tasks() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "demo"))
        yield importlib.import_module("tool_tasks")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


def test_training_text_equals_the_chat_template(tool_tasks: ModuleType, tokenizer: PreTrainedTokenizerBase) -> None:
    rng = Random(1)
    for number in range(SCENES):
        scene = tool_tasks.scene(rng, held_out=number % 2 == 1, turns=rng.choice((1, 1, 2)))
        messages = scene.messages()
        taught = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in tool_tasks.turns_of(messages, scene.tools))
        read = tokenizer.apply_chat_template(messages, tools=[tool.schema() for tool in scene.tools], tokenize=False)
        assert taught == read


def test_training_data_does_not_have_the_held_out_words(tool_tasks: ModuleType) -> None:
    def words(held_out: bool) -> set[str]:
        drawn = (tool_tasks.scene(Random(seed), held_out=held_out) for seed in range(SCENES))
        found = (part for scene in drawn for tool in scene.tools for name, _ in tool.parameters for part in name.split("_"))
        return set(found) - {"the", "name", "id"}

    assert not words(True) & words(False)


def test_final_answer_contains_the_last_tool_result(tool_tasks: ModuleType) -> None:
    rng, seen = Random(2), {"one": 0, "chain": 0}
    for kind in seen:
        for _ in range(SCENES // 4):
            (question,) = tool_tasks.scene(rng, held_out=True, kind=kind).questions
            assert len(question.turns) >= (2 if kind == "chain" else 1)
            calls = [call for turn in question.turns for call in turn.calls]
            results = [json.loads(call.result) if call.result[:1] in '{"' else call.result for call in calls]
            value = results[-1]
            shown = str(list(value.values())[-1]) if isinstance(value, dict) else str(value)
            assert shown in question.answer and shown not in question.text
            for before, after in pairwise(calls):
                assert next(iter(after.arguments.values())) in before.result
            seen[kind] += 1
    assert all(seen.values())

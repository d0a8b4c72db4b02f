"""Tests that drafting on a device gives the token ids and bits of plain decoding.

Each drafter is tested, with and without CUDA graphs. The host may wait only for results.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec.build import DeviceExecutor
from rootstock_llm.services.worker.exec.contracts.operations import ReleaseMemory, ResumeMemory
from tests.exec.always_guessing import always, now_and_then
from tests.exec.device_executors import executor_of
from tests.exec.draft_folders import add_mtp, write_eagle3
from tests.exec.guesses import Guesses
from tests.exec.random_contexts import Asked, Turned, World, alone, strings, targets
from tests.exec.tiny_models import TinyModel
from tests.gpu.test_sync import no_synchronizing

CONTEXTS, PROMPT_TOKENS, NEW_TOKENS = 30, 45, 30
WORLD = World(max_drafts=4)
MODEL = TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128})
SIZES = {
    "page_size": WORLD.page_size,
    "max_slots": WORLD.max_slots,
    "num_pages": WORLD.num_pages,
    "context_len": WORLD.context_len,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with an MTP layer. Its subfolder has an EAGLE-3 head."""
    made = tmp_path_factory.mktemp("model")
    MODEL.build(made / "target", torch.bfloat16)
    add_mtp(made / "target", deepseek=False)
    write_eagle3(made / "eagle3", made / "target", draft_vocab=100)
    return made


def made_of(folder: Path, device: str, algorithm: str, deterministic: bool = True, **options: Any) -> DeviceExecutor:
    draft = {"draft": "target", "eagle3": "eagle3"}.get(algorithm)
    if algorithm != "none":
        options |= {"max_drafts": WORLD.max_drafts, "speculative_algorithm": algorithm}
        options |= {"draft_model": str(folder / draft) if draft else ""}
    made = executor_of(folder / "target", device, **SIZES, dtype="bfloat16", deterministic=deterministic, **options)
    assert isinstance(made, DeviceExecutor)
    return made


def asked(number: int) -> Asked:
    return list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]


def guess_with(executor: DeviceExecutor, plain: DeviceExecutor, target: Asked, errors: float) -> Guesses:
    guesses = Guesses([[*target.prompt, *alone(World(), plain, target).tokens]], errors, WORLD.vocab_size)
    executor._steps._drafter = guesses  # type: ignore[attr-defined]
    return guesses


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_drafting_gives_the_bits_of_plain_decoding_in_deterministic_mode(folder: Path, device: str, graphs: bool) -> None:
    """About a third of the draft tokens are wrong."""
    plain, drafting = (made_of(folder, device, name, cuda_graphs=graphs) for name in ("none", "ngram"))
    for number in range(3):
        guesses = guess_with(drafting, plain, asked(number), 0.3)
        expected = strings(World(), plain, asked(number), range(1))
        assert strings(WORLD, drafting, asked(number), range(CONTEXTS)) == expected and guesses.accepted > 0
    plain.close()
    drafting.close()


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("algorithm", ["ngram", "draft", "eagle3", "mtp"])
def test_each_drafter_gives_the_bits_of_plain_decoding(
    folder: Path, device: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits must equal those of plain decoding, both before memory is released and after it is resumed.

    If the draft model is the target itself, most of its draft tokens must be accepted.
    """
    plain, drafting = made_of(folder, device, "none"), made_of(folder, device, algorithm)
    monkeypatch.setattr(DraftController, "choose", always)
    expected = alone(World(), plain, asked(0)).bits()
    for _ in range(2):
        answer = alone(WORLD, drafting, asked(0))
        assert answer.bits() == expected
        assert algorithm not in ("eagle3", "mtp") or answer.verified.drafted > NEW_TOKENS
        assert algorithm != "draft" or answer.verified.drafted >= 3 * answer.verified.rows > 0
        assert algorithm != "draft" or answer.verified.accepted > answer.verified.drafted // 2
        drafting.apply(ReleaseMemory(kv=True, weights=True))
        drafting.apply(ResumeMemory(kv=True, weights=True))
    plain.close()
    drafting.close()


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_drafting_runs_with_each_attention_back_end(
    folder: Path, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the kernels are compiled, the host may wait only for events. Each result must have the time of its step.

    At the end, the draft tokens are the output of plain decoding. Longer steps may round differently and reject some of them, but
    not all.
    """
    options: dict[str, Any] = {"deterministic": False, "attention_backend": backend}
    plain, drafting = made_of(folder, device, "none", **options), made_of(folder, device, "eagle3", **options)
    monkeypatch.setattr(DraftController, "choose", now_and_then())
    seconds: list[float] = []
    wait = drafting.wait

    def timed(run: Any) -> Any:
        result = wait(run)
        seconds.append(result.seconds)
        return result

    monkeypatch.setattr(drafting, "wait", timed)
    for quiet in (False, True):
        turned = Turned(WORLD.config(), drafting, overlap=True)
        answers = [turned.submit(asked(number)) for number in range(3)]
        if quiet:
            with no_synchronizing():
                turned.finish()
        else:
            turned.finish()
        assert [len(answer.tokens) for answer in answers] == [NEW_TOKENS] * 3
    assert seconds and all(0 < each < 10 for each in seconds)
    guesses = guess_with(drafting, plain, asked(0), 0.0)
    alone(WORLD, drafting, asked(0))
    assert guesses.accepted > 0
    plain.close()
    drafting.close()

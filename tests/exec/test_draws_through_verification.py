"""Tokens that are sampled by verifying draft tokens have the exact probabilities of sampling without drafting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.drafting.ngram import NgramDrafter
from tests.core.deployed_config import deployed_config
from tests.exec.always_guessing import always
from tests.exec.random_contexts import Asked, Turned
from tests.night import NIGHTLY

DRAWS = 100_000 if NIGHTLY else 12_500
TOKENS, SLOTS, PAGE_SIZE, PAGES, DRAFTS = 125, 4, 16, 64, 3
LOGITS = (1.5, 1.0, 0.0, -1.0, -2000.0)  # the probability of the last token is 0
# Limits of the chi-square statistic by degrees of freedom. A correct sampler exceeds its limit in one of a million tests.
MOST = {1: 23.93, 2: 27.63, 3: 30.66}


class MostlyLikely(NgramDrafter):
    """Proposes the most likely token, and sometimes a token of probability 0.

    `runs` has one entry per row and step: the output tokens of the row in this step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Sequence[int]] = []
        self._asked = 0

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        self._asked += 1
        return {slot: [4 if (self._asked + place) % 7 == 0 else 0 for place in range(most)] for slot, most in wanted.items()}

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        self.runs.append(tokens)


def write_toy(folder: Path) -> None:
    """Writes a model whose logits are LOGITS after every text."""
    config = LlamaConfig(
        vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()[:, 0] = 1.0
        for linear in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            linear.weight.zero_()
        # Only one of the 16 elements of the hidden state is not 0. The RMS norm scales it to 4, so the head is divided by 4.
        model.lm_head.weight.zero_()[:, 0] = torch.tensor(LOGITS) / 4
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def probabilities(top_p: float) -> np.ndarray:
    """Returns the expected probabilities. Top-p keeps the most likely tokens until their sum reaches top_p, and renormalizes."""
    chances = np.exp(np.array(LOGITS))
    chances /= chances.sum()
    kept = np.cumsum(chances) - chances < top_p
    return np.where(kept, chances, 0) / chances[kept].sum()


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize("top_p", [1.0, 0.84, 0.841], ids=["all", "two tokens", "three tokens"])
def test_sampled_tokens_follow_the_exact_probabilities_with_draft_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    """The sum of the two largest probabilities is 0.8403.

    - A top_p of 0.84 is just below this sum, so it keeps two tokens.
    - A top_p of 0.841 is just above this sum, so it keeps three tokens.
    - A top_p of 1.0 keeps the four tokens with a probability above 0.

    The test checks the counts of all tokens together, and of the tokens at each index within a step. Both include accepted draft
    tokens and the tokens that replace rejected ones.
    """
    monkeypatch.setattr(DraftController, "choose", always)
    write_toy(tmp_path)
    options = DeviceOptions(device="cpu", num_threads=1, max_drafts=DRAFTS)
    executor, _ = build_device_executor(str(tmp_path), "float32", PAGE_SIZE, SLOTS, PAGES, 0.5, 256, options, lambda _: None)
    drafter = executor._steps._drafter = MostlyLikely()  # type: ignore[attr-defined]
    sizes = {"num_pages": PAGES, "page_size": PAGE_SIZE, "context_len": 256, "vocab_size": 5, "max_drafts": DRAFTS}
    config = deployed_config(**sizes, max_running_requests=SLOTS, chunked_prefill_size=0, enable_radix_cache=False)
    turned = Turned(config, executor, overlap=True)
    answers = []
    for seed in range(DRAWS // TOKENS):
        params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, top_p=top_p, seed=seed, ignore_eos=True)
        answers.append(turned.submit(Asked((1, 2, 3), params)))
    turned.finish()
    executor.close()
    tokens = np.array([answer.tokens for answer in answers])
    assert tokens.shape == (DRAWS // TOKENS, TOKENS)
    expected = probabilities(top_p)
    assert np.count_nonzero(expected) == {1.0: 4, 0.84: 2, 0.841: 3}[top_p]
    most = 1 + DRAFTS
    by_place = [np.bincount([run[place] for run in drafter.runs if len(run) > place], minlength=5) for place in range(most)]
    assert sum(counts.sum() for counts in by_place) == tokens.size and by_place[-1].sum() > DRAWS // 50
    for counts in (np.bincount(tokens.ravel(), minlength=5), *by_place):
        assert not counts[expected == 0].any(), "a token with probability 0 must never be sampled"
        wanted = expected * counts.sum()
        drawn = expected > 0
        statistic = float((((counts - wanted) ** 2)[drawn] / wanted[drawn]).sum())
        assert statistic < MOST[np.count_nonzero(drawn) - 1], (counts, wanted)

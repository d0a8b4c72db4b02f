"""The layer for multi-token prediction in Qwen3.5's checkpoints: its draft tokens equal those of plain torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from tests.exec.always_guessing import always
from tests.exec.random_contexts import World, alone, strings, targets
from tests.exec.test_parity import VISION
from tests.exec.tiny_models import MODELS
from tests.night import NIGHTLY

CONTEXTS = 50 if NIGHTLY else 2
WORLD = World(max_drafts=4, drafts_by_model=True)
PROMPT_TOKENS, NEW_TOKENS = 37, 24


def add_mtp(folder: Path, config: Any) -> None:
    """Adds the tensors `mtp.*` of a Qwen3.5 checkpoint, with random values. The weights of norms are stored minus 1."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "self_attn.q_proj": (2 * heads * size, hidden),
        "self_attn.k_proj": (kv_heads * size, hidden),
        "self_attn.v_proj": (kv_heads * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"fc": (hidden, 2 * hidden), "norm": (hidden,), "pre_fc_norm_hidden": (hidden,), "pre_fc_norm_embedding": (hidden,)}
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(5)
    drawn = {f"mtp.{name}.weight": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    file = folder / "model.safetensors"
    save_file({**load_file(file), **drawn}, file, metadata={"format": "pt"})


class MtpReference:
    """Computes draft tokens by the published architecture: DeepSeek-V3, section 2.2, with a layer of Qwen3-Next."""

    def __init__(self, model: Any, config: Any, tensors: dict[str, Tensor]) -> None:
        self._model, self._config = model, config
        self._own = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items() if name.startswith("mtp.")}

    def guesses(self, text: Sequence[int], count: int) -> list[int]:
        """Returns the `count` draft tokens after a text."""
        with torch.inference_mode():
            states = self._model.model(torch.tensor([list(text)])).last_hidden_state[0, :-1]
            found: list[int] = []
            for _ in range(count):
                output = self._computed(torch.tensor([*text[1:], *found]), states)
                found.append(int(self._model.lm_head(output[-1]).argmax()))
                states = torch.cat((states, output[-1:]))
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return normed * (1.0 + self._own[f"{name}.weight"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._own[f"{name}.weight"])

    def _computed(self, ids: Tensor, states: Tensor) -> Tensor:
        embedded = self._norm(self._model.model.embed_tokens(ids), "pre_fc_norm_embedding")
        x = self._linear(torch.cat((embedded, self._norm(states, "pre_fc_norm_hidden")), 1), "fc")
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(normed, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        return self._norm(x + self._linear(F.silu(gate) * up, "layers.0.mlp.down_proj"), "norm")

    def _attention(self, x: Tensor) -> Tensor:
        config, size = self._config, self._config.head_dim
        both = self._linear(x, "layers.0.self_attn.q_proj").view(len(x), config.num_attention_heads, 2 * size)
        q, gate = both[..., :size], both[..., size:].flatten(1)
        k, v = (self._linear(x, f"layers.0.self_attn.{name}_proj").view(len(x), -1, size) for name in "kv")
        q, k = (self._rotated(self._norm(part, f"layers.0.self_attn.{name}_norm")) for part, name in ((q, "q"), (k, "k")))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed = mixed[0].transpose(0, 1).flatten(1) * torch.sigmoid(gate)
        return self._linear(mixed, "layers.0.self_attn.o_proj")

    def _rotated(self, part: Tensor) -> Tensor:
        """Rotates the first elements of each head, [T, heads, D]."""
        rope = self._config.rope_parameters
        rotated = int(part.shape[-1] * rope["partial_rotary_factor"])
        exponents = torch.arange(0, rotated, 2) / rotated
        angles = torch.arange(len(part))[:, None] / rope["rope_theta"] ** exponents
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = part[..., :rotated].chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, part[..., rotated:]), -1)


def made_of(folder: Path, algorithm: str) -> tuple[DeviceExecutor, World]:
    world = WORLD if algorithm == "mtp" else World()
    options = DeviceOptions(
        device="cpu",
        num_threads=1,
        deterministic=True,
        max_drafts=world.max_drafts,
        speculative_algorithm=algorithm,
        max_chunk=256,
    )
    sizes = (world.page_size, world.max_slots, world.num_pages, 0.5, world.context_len)
    executor, info = build_device_executor(str(folder), "float32", *sizes, options, lambda _: None, check_relay=True)
    return executor, World(max_drafts=world.max_drafts, drafts_by_model=world.drafts_by_model, groups=info.groups)


@pytest.fixture(scope="module", params=["text", "wrapper"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of text, or one of text and images, whose tensors begin with `model.language_model.`."""
    made = tmp_path_factory.mktemp("model")
    text = MODELS["qwen3.5"].build(made)
    if request.param == "wrapper":
        made = tmp_path_factory.mktemp("wrapper")
        config = transformers.Qwen3_5Config(text_config=text.config.to_dict(), vision_config=VISION["Qwen3_5"])
        config.tie_word_embeddings = text.config.tie_word_embeddings
        whole = transformers.Qwen3_5ForConditionalGeneration(config)
        whole.model.language_model.load_state_dict(text.model.state_dict(), strict=False)
        whole.save_pretrained(made)
    add_mtp(made, text.config)
    yield made


def test_draft_tokens_of_qwen35_equal_plain_torch_and_change_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftController, "choose", always)
    (plain, plain_world), (drafting, world) = made_of(folder, "none"), made_of(folder, "mtp")
    target = next(targets(world, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    tensors = load_file(folder / "model.safetensors")
    text = MODELS["qwen3.5"].build(folder / "reference")
    reference = MtpReference(text, text.config, tensors)
    drafter = drafting._steps._drafter  # type: ignore[attr-defined]
    propose, proposed = drafter.propose, []

    def record(wanted: dict[int, int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = propose(wanted)
        proposed.extend((list(drafter._slots[slot].text), guess) for slot, guess in found.items())
        return found

    monkeypatch.setattr(drafter, "propose", record)
    expected = alone(plain_world, plain, target)
    answer = alone(world, drafting, target)
    assert answer.bits() == expected.bits() and len(proposed) > NEW_TOKENS // 5
    for before, guess in proposed:
        assert guess == reference.guesses(before, len(guess))
    assert strings(world, drafting, target, range(CONTEXTS)) == {expected.bits()}
    plain.close()
    drafting.close()

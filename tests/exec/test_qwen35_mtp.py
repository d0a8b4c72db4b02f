"""The layer for multi-token prediction in Qwen3.5's checkpoints: its draft tokens equal those of plain torch."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
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
from tests.exec.expert_folders import fuse_experts
from tests.exec.random_contexts import World, alone, strings, targets
from tests.exec.test_parity import VISION
from tests.exec.tiny_models import MODELS
from tests.night import NIGHTLY

CONTEXTS = 50 if NIGHTLY else 2
WORLD = World(max_drafts=4, drafts_by_model=True)
PROMPT_TOKENS, NEW_TOKENS = 37, 24


def mlp_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an MLP's weights: those of one MLP, or of a router, experts and a shared expert."""
    hidden = config.hidden_size
    count = getattr(config, "num_experts", 0)

    def gated(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
        shapes = {f"{prefix}{name}_proj": (inner, hidden) for name in ("gate", "up")}
        return {**shapes, f"{prefix}down_proj": (hidden, inner)}

    if not count:
        return gated("", config.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {"gate": (count, hidden), "shared_expert_gate": (1, hidden)}
    for expert in range(count):
        shapes |= gated(f"experts.{expert}.", config.moe_intermediate_size)
    return shapes | gated("shared_expert.", config.shared_expert_intermediate_size)


def add_mtp(folder: Path, config: Any, fused: bool) -> None:
    """Adds the tensors `mtp.*` of a Qwen3.5 checkpoint, with random values. The weights of norms are stored minus 1.

    Args:
        fused: whether the experts are stored in one tensor.
    """
    hidden, size = config.hidden_size, config.head_dim
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
        **{f"mlp.{name}": shape for name, shape in mlp_shapes(config).items()},
    }
    shapes = {"fc": (hidden, 2 * hidden), "norm": (hidden,), "pre_fc_norm_hidden": (hidden,), "pre_fc_norm_embedding": (hidden,)}
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(5)
    drawn = {f"mtp.{name}.weight": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    file = folder / "model.safetensors"
    save_file({**load_file(file), **drawn}, file, metadata={"format": "pt"})
    if fused:
        fuse_experts(folder)


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

    def _gated(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.gate.weight" not in self._own:
            return self._gated(x, name)
        out = torch.sigmoid(self._linear(x, f"{name}.shared_expert_gate")) * self._gated(x, f"{name}.shared_expert")
        best = self._linear(x, f"{name}.gate").softmax(-1).topk(self._config.num_experts_per_tok)
        for row, (weights, experts) in enumerate(zip(best.values, best.indices.tolist(), strict=True)):
            for weight, expert in zip(weights / weights.sum(), experts, strict=True):
                out[row] += weight * self._gated(x[row : row + 1], f"{name}.experts.{expert}")[0]
        return out

    def _computed(self, ids: Tensor, states: Tensor) -> Tensor:
        embedded = self._norm(self._model.model.embed_tokens(ids), "pre_fc_norm_embedding")
        x = self._linear(torch.cat((embedded, self._norm(states, "pre_fc_norm_hidden")), 1), "fc")
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        return self._norm(x + self._mlp(normed, "layers.0.mlp"), "norm")

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


@dataclass(frozen=True)
class MtpModel:
    folder: Path
    text: Any  # transformers' model of the text
    tensors: dict[str, Tensor]  # tensors of the MTP layer, each expert separately


@pytest.fixture(scope="module", params=["text", "wrapper", "text-moe", "wrapper-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpModel:
    """A checkpoint of text, or one of text and images, whose tensors begin with `model.language_model.`.

    In the latter, the experts of a layer are in one tensor.
    """
    form, _, experts = request.param.partition("-")
    made = tmp_path_factory.mktemp("model")
    text = MODELS["qwen3.5-moe" if experts else "qwen3.5"].build(made)
    if form == "wrapper":
        made = tmp_path_factory.mktemp("wrapper")
        family = "Qwen3_5Moe" if experts else "Qwen3_5"
        config = getattr(transformers, f"{family}Config")(text_config=text.config.to_dict(), vision_config=VISION[family])
        config.tie_word_embeddings = text.config.tie_word_embeddings
        whole = getattr(transformers, f"{family}ForConditionalGeneration")(config)
        whole.model.language_model.load_state_dict(text.model.state_dict(), strict=False)
        whole.save_pretrained(made)
    separate = tmp_path_factory.mktemp("separate")
    shutil.copytree(made, separate, dirs_exist_ok=True)
    add_mtp(separate, text.config, fused=False)
    add_mtp(made, text.config, fused=bool(experts) and form == "wrapper")
    return MtpModel(made, text, load_file(separate / "model.safetensors"))


def test_draft_tokens_of_qwen35_equal_plain_torch_and_change_no_bit(model: MtpModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftController, "choose", always)
    (plain, plain_world), (drafting, world) = made_of(model.folder, "none"), made_of(model.folder, "mtp")
    target = next(targets(world, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    reference = MtpReference(model.text, model.text.config, model.tensors)
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

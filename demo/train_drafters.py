"""Trains what guesses for the demo model: an EAGLE-3 head, a layer for multi-token prediction, and a smaller model.

python demo/train_drafters.py --minutes 30

All three learn at once from what the demo model says of the conversations that train.py makes, on other seeds. Each is a folder
beside models/demo; the head and the layer are unrolled over their own states, as they are when they guess several tokens ahead
("training-time test", https://arxiv.org/abs/2503.01840, 3.2).
"""

import argparse
import json
import math
import time
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from train import IGNORED, MODEL, Batch, Progress, make_row
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

KEPT = (1, 2, 3)  # layers of the demo model whose outputs the EAGLE-3 head reads
DEPTH, FADING = 3, 0.8  # guesses ahead, and what each counts to the one before it
DRAFT_TOKENS = 1024  # the head's vocabulary: those that are said most
ROW = 256  # tokens of a row
SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2, "size": 64, "inner": 640}
EPS, THETA = 1e-6, 10_000.0


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)


def linear(outs: int, ins: int) -> nn.Linear:
    made = nn.Linear(ins, outs, bias=False)
    nn.init.normal_(made.weight, std=0.02)
    return made


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x: [B, T, heads, D]."""
    angles = positions[:, None] / THETA ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(nn.Module):
    """attended: numbers that attention is of. Keeps keys and values of earlier depths of one unrolled pass."""

    def __init__(self, attended: int, qk_norm: bool) -> None:
        super().__init__()
        size, hidden = SHAPE["size"], SHAPE["hidden"]
        q, kv = SHAPE["heads"] * size, SHAPE["kv_heads"] * size
        attention = {"q_proj": linear(q, attended), "k_proj": linear(kv, attended), "v_proj": linear(kv, attended)}
        norms = {"q_norm": Norm(size), "k_norm": Norm(size)} if qk_norm else {}
        self.self_attn = nn.ModuleDict(attention | {"o_proj": linear(hidden, q)} | norms)
        self.mlp = nn.ModuleDict(
            {"gate_proj": linear(SHAPE["inner"], hidden), "up_proj": linear(SHAPE["inner"], hidden)}
            | {"down_proj": linear(hidden, SHAPE["inner"])}
        )
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)

    def forward(self, x: Tensor, residual: Tensor, depth: int, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x: [B, T, attended] at positions depth .. depth + T - 1. Entry t of a depth sees the first depth's up to t, and entry t
        of each depth since."""
        parts, size, own = self.self_attn, SHAPE["size"], {}
        for name in "qkv":
            own[name] = parts[f"{name}_proj"](x).unflatten(-1, (-1, size))
            if name != "v":
                normed = parts[f"{name}_norm"](own[name]) if f"{name}_norm" in parts else own[name]
                own[name] = rotated(normed, torch.arange(depth, depth + x.shape[1]))
        shared = SHAPE["heads"] // SHAPE["kv_heads"]
        q = own["q"].transpose(1, 2)
        earlier.append(tuple(own[name].repeat_interleave(shared, 2).transpose(1, 2) for name in "kv"))
        first = earlier[0][0]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = [(q @ first.transpose(-1, -2)).masked_fill(~mask, -math.inf)]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in earlier[1:]]
        weights = (torch.cat(scores, -1) * size**-0.5).softmax(-1)
        mixed = weights[..., : x.shape[1]] @ earlier[0][1]
        for place, (_, values) in enumerate(earlier[1:]):
            mixed = mixed + weights[..., x.shape[1] + place, None] * values
        residual = residual + parts["o_proj"](mixed.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(residual)
        return residual + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


class Eagle3(nn.Module):
    def __init__(self, target: Qwen3ForCausalLM, ids: Tensor) -> None:
        super().__init__()
        hidden = SHAPE["hidden"]
        self.fc, self.midlayer, self.norm = linear(hidden, hidden * len(KEPT)), Layer(2 * hidden, qk_norm=False), Norm(hidden)
        self.midlayer.hidden_norm = Norm(hidden)
        self.lm_head = linear(len(ids), hidden)
        self.lm_head.weight.data.copy_(target.lm_head.weight[ids])

    def first(self, kept: list[Tensor], final: Tensor) -> Tensor:
        return self.fc(torch.cat([kept[layer] for layer in KEPT], -1))

    def step(self, embedded: Tensor, states: Tensor, depth: int, earlier: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Normed output, and the states that the next depth begins with."""
        x = torch.cat((self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(states)), -1)
        output = self.midlayer(x, states, depth, earlier)
        return self.norm(output), output


class Mtp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = SHAPE["hidden"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = Norm(hidden), Norm(hidden), Norm(hidden)
        self.fc, self.layers = linear(hidden, 2 * hidden), nn.ModuleList([Layer(hidden, qk_norm=True)])

    def first(self, kept: list[Tensor], final: Tensor) -> Tensor:
        return final

    def step(self, embedded: Tensor, states: Tensor, depth: int, earlier: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        residual = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)), -1))
        output = self.norm(self.layers[0](self.layers[0].input_layernorm(residual), residual, depth, earlier))
        return output, output


def small_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=1280,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


class Teacher:
    """What the demo model knows and says of a batch."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model, self._outputs = model, []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, __, out: self._outputs.append(out[0] if isinstance(out, tuple) else out))

    def __call__(self, tokens: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Layers' outputs, final states, log probabilities [B, T, V]."""
        self._outputs.clear()
        with torch.no_grad():
            final = self._model.model(input_ids=tokens, use_cache=False).last_hidden_state
            return list(self._outputs), final, self._model.lm_head(final).log_softmax(-1)


def divergence(logits: Tensor, said: Tensor, ids: Tensor | None) -> tuple[Tensor, float]:
    """Cross entropy to what the teacher says, of its words that there are; and how often the most likely is the teacher's."""
    likely = said.argmax(-1)
    if ids is not None:
        guessed = ids[logits.argmax(-1)]
        said = said[:, ids]
        said = said - said.logsumexp(-1, keepdim=True)
    else:
        guessed = logits.argmax(-1)
    loss = -(said.exp() * logits.log_softmax(-1)).sum(-1).mean()
    return loss, float((guessed == likely).float().mean())


def head_loss(
    head: Eagle3 | Mtp, target: Qwen3ForCausalLM, taught: tuple[list[Tensor], Tensor, Tensor], batch: Batch, ids: Tensor | None
) -> tuple[Tensor, list[float]]:
    """Over DEPTH guesses ahead of each token that the assistant says."""
    kept, final, said = taught
    tokens, length = batch.tokens, batch.tokens.shape[1] - DEPTH - 1
    states, earlier = head.first(kept, final)[:, :length], []
    loss, right = torch.zeros(()), []
    for depth in range(DEPTH):
        embedded = target.model.embed_tokens(tokens[:, depth + 1 : depth + 1 + length])
        output, states = head.step(embedded, states, depth, earlier)
        learnt = batch.labels[:, depth + 2 : depth + 2 + length] != IGNORED
        logits = target.lm_head(output[learnt]) if ids is None else head.lm_head(output[learnt])
        part, share = divergence(logits, said[:, depth + 1 : depth + 1 + length][learnt], ids)
        loss, right = loss + FADING**depth * part, [*right, round(share, 3)]
    return loss, right


def small_loss(model: Qwen3ForCausalLM, said: Tensor, batch: Batch) -> tuple[Tensor, list[float]]:
    learnt = batch.labels[:, 1:] != IGNORED
    hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[:, :-1]
    loss, share = divergence(model.lm_head(hidden[learnt]), said[:, :-1][learnt], None)
    return loss, [round(share, 3)]


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: Random, tokens: int) -> Batch:
    rows = [make_row(tokenizer, rng, ROW) for _ in range(tokens // ROW)]
    return Batch(torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows]))


def said_most(tokenizer: PreTrainedTokenizerFast, rng: Random) -> Tensor:
    """The tokens that assistants say most, rising."""
    counts = torch.zeros(len(tokenizer), dtype=torch.int64)
    for _ in range(40):
        batch = make_batch(tokenizer, rng, 4096)
        counts += torch.bincount(batch.labels[batch.labels != IGNORED], minlength=len(tokenizer))
    return counts.argsort(descending=True, stable=True)[:DRAFT_TOKENS].sort().values


# Files.


def save(tensors: dict[str, Tensor], config: dict, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    halves = {
        name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(halves, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def head_config(architecture: str, **more: object) -> dict:
    config = {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 1280}
    config |= {"hidden_size": SHAPE["hidden"], "intermediate_size": SHAPE["inner"], "num_attention_heads": SHAPE["heads"]}
    config |= {"num_key_value_heads": SHAPE["kv_heads"], "head_dim": SHAPE["size"], "rms_norm_eps": EPS, "hidden_act": "silu"}
    return config | {
        "rope_theta": THETA,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **more,
    }


def save_all(eagle3: Eagle3, mtp: Mtp, small: Qwen3ForCausalLM, ids: Tensor, out: Path) -> None:
    known = torch.zeros(1280, dtype=torch.bool).index_fill_(0, ids, True)
    tables = {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    reads = {"eagle_aux_hidden_state_layer_ids": list(KEPT)}
    config = head_config("LlamaForCausalLMEagle3", draft_vocab_size=len(ids), eagle_config=reads)
    save({**eagle3.state_dict(), **tables}, config, out / "demo-eagle3")
    save(
        {f"mtp.{name}": tensor for name, tensor in mtp.state_dict().items()}, head_config("Qwen3ForCausalLMMtp"), out / "demo-mtp"
    )
    half = Qwen3ForCausalLM(small.config).to(torch.bfloat16)
    half.load_state_dict(small.state_dict())
    half.save_pretrained(out / "demo-draft")
    for name in ("demo-eagle3", "demo-mtp", "demo-draft"):
        (out / name / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL.parent)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--peak-rate", type=float, default=2e-3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rng, tokenizer = Random(arguments.seed), AutoTokenizer.from_pretrained(MODEL)
    target = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().requires_grad_(False)
    ids, teacher = said_most(tokenizer, rng), Teacher(target)
    eagle3, mtp, small = Eagle3(target, ids), Mtp(), small_model()
    learners = nn.ModuleList([eagle3, mtp, small])
    optimizer = torch.optim.AdamW(learners.parameters(), betas=(0.9, 0.98), weight_decay=0.02, fused=True)
    progress = Progress(arguments.steps, arguments.minutes * 60, time.monotonic())
    while (fraction := progress.fraction()) < 1:
        batch = make_batch(tokenizer, rng, arguments.tokens_per_step)
        taught = teacher(batch.tokens)
        parts = {
            "eagle3": head_loss(eagle3, target, taught, batch, ids),
            "mtp": head_loss(mtp, target, taught, batch, None),
            "draft": small_loss(small, taught[2], batch),
        }
        for group in optimizer.param_groups:
            warm = min(1.0, (progress.step + 1) / 50)
            group["lr"] = arguments.peak_rate * warm * 0.5 * (1 + math.cos(math.pi * fraction))
        learners.zero_grad()
        sum(loss for loss, _ in parts.values()).backward()
        for learner in learners:
            nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        progress.step += 1
        if progress.step % 10 == 0:
            shares = {name: right for name, (_, right) in parts.items()}
            print(
                json.dumps({"step": progress.step, "seconds": round(time.monotonic() - progress.started), **shares}), flush=True
            )
    save_all(eagle3, mtp, small, ids, arguments.out)


if __name__ == "__main__":
    main()

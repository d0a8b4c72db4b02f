"""Trains three drafters for the demo model: an EAGLE-3 head, a layer for multi-token prediction (MTP) and a smaller model.

python demo/train_drafters.py --minutes 30
python demo/train_drafters.py --start models --only eagle3 --tasks copy=4,json=1 --minutes 30  # continues from existing weights

All three learn at the same time from the demo model's probabilities for conversations of train.py with other seeds. Each is
written to its own folder next to models/demo. Head and MTP layer are unrolled over their own states, as when they draft several
tokens ("training-time test", https://arxiv.org/abs/2503.01840, 3.2).
"""

import argparse
import json
import math
import time
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tasks import TASKS, conversation, sample_training
from torch import Tensor, nn
from train import IGNORED, MODEL, SHORT_ROW_TURNS, Batch, Progress, encode_document, make_row
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

KEPT = (1, 2, 3)  # layers of the demo model whose outputs the EAGLE-3 head reads
DEPTH, FADING = 3, 0.8  # draft tokens per position, and weight of each relative to the one before
DRAFT_TOKENS = 1024  # size of the head's vocabulary: the most frequent tokens
ROW = 256  # tokens of a row
TASKS_SHARE = 0.75  # share of the rows that have only the tasks of --tasks, if --tasks is given
FOLDERS = {"eagle3": "demo-eagle3", "mtp": "demo-mtp", "draft": "demo-draft"}
SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2, "size": 64, "inner": 640}
EPS, THETA = 1e-6, 10_000.0


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """Gathers x [B, T, n] at the positions `places` [B, M]. Returns [B, M, n]."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def linear(outs: int, ins: int) -> nn.Linear:
    made = nn.Linear(ins, outs, bias=False)
    nn.init.normal_(made.weight, std=0.02)
    return made


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Applies rotary embeddings to x [B, T, heads, D]. positions: [T] or [B, T]."""
    angles = positions[..., None] / THETA ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(nn.Module):
    """A transformer layer for drafting. In an unrolled pass, each depth also attends to the entries of earlier depths.

    Args:
        attended: width of the input of attention.
        qk_norm: whether queries and keys are normalized.
    """

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

    def forward(self, x: Tensor, residual: Tensor, places: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the output at the positions `places`.

        Entry t of a depth attends to entries up to t of the first depth, and to entry t of each later depth.

        Args:
            x: inputs of attention. First depth: of all entries, [B, T, attended]. Later depths: at `places`, [B, M, attended].
            residual: residual stream at `places`.
            places: [B, M], positions of the entries that draft a token.
            earlier: keys and values of earlier depths; those of this depth are appended.
        """
        parts, size, depth, shared = self.self_attn, SHAPE["size"], len(earlier), SHAPE["heads"] // SHAPE["kv_heads"]

        def heads(name: str, x: Tensor, positions: Tensor) -> Tensor:
            made = parts[f"{name}_proj"](x).unflatten(-1, (-1, size))
            if name == "v":
                return made.repeat_interleave(shared, 2).transpose(1, 2)
            made = rotated(parts[f"{name}_norm"](made) if f"{name}_norm" in parts else made, positions)
            return (made if name == "q" else made.repeat_interleave(shared, 2)).transpose(1, 2)

        asking, own = (x, places + depth) if depth else (at_places(x, places), torch.arange(x.shape[1]))
        q = heads("q", asking, places + depth)
        earlier.append((heads("k", x, own), heads("v", x, own)))
        first, values = earlier[0]
        unseen = torch.arange(first.shape[2]) > places[:, None, :, None]
        scores = [(q @ first.transpose(-1, -2)).masked_fill(unseen, -math.inf)]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in earlier[1:]]
        weights = (torch.cat(scores, -1) * size**-0.5).softmax(-1)
        mixed = weights[..., : first.shape[2]] @ values
        for place, (_, values) in enumerate(earlier[1:]):
            mixed = mixed + weights[..., first.shape[2] + place, None] * values
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

    def step(
        self, embedded: Tensor, states: Tensor, places: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns the normed output at `places` (see Layer) and the states for the next depth."""
        x = torch.cat((self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(states)), -1)
        output = self.midlayer(x, states if earlier else at_places(states, places), places, earlier)
        return self.norm(output), output


class Mtp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = SHAPE["hidden"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = Norm(hidden), Norm(hidden), Norm(hidden)
        self.fc, self.layers = linear(hidden, 2 * hidden), nn.ModuleList([Layer(hidden, qk_norm=True)])

    def first(self, kept: list[Tensor], final: Tensor) -> Tensor:
        return final

    def step(
        self, embedded: Tensor, states: Tensor, places: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)), -1))
        layer, residual = self.layers[0], x if earlier else at_places(x, places)
        output = self.norm(layer(layer.input_layernorm(x), residual, places, earlier))
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
    """The demo model as a teacher: its states and probabilities for a batch."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model, self._outputs = model, []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, __, out: self._outputs.append(out[0] if isinstance(out, tuple) else out))

    def __call__(self, tokens: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns the layers' outputs, the final states and the log probabilities [B, T, V]."""
        self._outputs.clear()
        with torch.no_grad():
            final = self._model.model(input_ids=tokens, use_cache=False).last_hidden_state
            return list(self._outputs), final, self._model.lm_head(final).log_softmax(-1)


def divergence(logits: Tensor, said: Tensor, ids: Tensor | None) -> tuple[Tensor, float]:
    """Returns the cross entropy to the teacher's probabilities, and the share of positions with the same likeliest token.

    Args:
        logits: the learner's logits, [n, V], or [n, number of ids].
        said: the teacher's log probabilities, [n, V].
        ids: tokens of the learner's vocabulary; None: all. Only the teacher's probabilities of these tokens count. Positions at
            which the teacher prefers another token therefore have little influence.
    """
    likely = said.argmax(-1)
    if ids is not None:
        guessed = ids[logits.argmax(-1)]
        said = said[:, ids]
    else:
        guessed = logits.argmax(-1)
    loss = -(said.exp() * logits.log_softmax(-1)).sum(-1).mean()
    return loss, float((guessed == likely).float().mean())


def head_loss(
    head: Eagle3 | Mtp, target: Qwen3ForCausalLM, taught: tuple[list[Tensor], Tensor, Tensor], batch: Batch, ids: Tensor | None
) -> tuple[Tensor, list[float]]:
    """Returns the loss over DEPTH draft tokens after each token of the assistant, and per depth the share of right drafts.

    Only the entries that draft tokens of the assistant are computed completely. Rows are padded to the largest number of these
    entries in a row.
    """
    kept, final, said = taught
    tokens, length = batch.tokens, batch.tokens.shape[1] - DEPTH - 1
    learnt = torch.stack([batch.labels[:, depth + 2 : depth + 2 + length] != IGNORED for depth in range(DEPTH)])
    guessing = learnt.any(0)
    places = guessing.int().argsort(dim=1, descending=True, stable=True)[:, : int(guessing.sum(1).max())]
    states, earlier = head.first(kept, final)[:, :length], []
    loss, right = torch.zeros(()), []
    for depth in range(DEPTH):
        known = tokens[:, 1 : length + 1] if depth == 0 else tokens.gather(1, places + depth + 1)
        output, states = head.step(target.model.embed_tokens(known), states, places, earlier)
        counted = learnt[depth].gather(1, places)
        logits = target.lm_head(output[counted]) if ids is None else head.lm_head(output[counted])
        part, share = divergence(logits, at_places(said, places + depth + 1)[counted], ids)
        loss, right = loss + FADING**depth * part, [*right, round(share, 3)]
    return loss, right


def small_loss(model: Qwen3ForCausalLM, said: Tensor, batch: Batch) -> tuple[Tensor, list[float]]:
    learnt = batch.labels[:, 1:] != IGNORED
    hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[:, :-1]
    loss, share = divergence(model.lm_head(hidden[learnt]), said[:, :-1][learnt], None)
    return loss, [round(share, 3)]


def make_tasks_row(tokenizer: PreTrainedTokenizerFast, rng: Random, shares: dict[str, float]) -> tuple[list[int], list[int]]:
    """Returns a row like those of make_row(), but only with questions of the tasks in `shares`."""

    def draw(_: str, rng: Random) -> tuple[str, str]:
        return sample_training(*rng.choices(list(shares), list(shares.values())), rng)

    tokens: list[int] = []
    labels: list[int] = []
    while len(tokens) < ROW:
        more_tokens, more_labels = encode_document(tokenizer, conversation(rng, rng.choice(SHORT_ROW_TURNS), draw), ())
        tokens += more_tokens
        labels += more_labels
    return tokens[:ROW], labels[:ROW]


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: Random, tokens: int, shares: dict[str, float]) -> Batch:
    """Makes a batch. `shares` has weights by task; if it is empty, make_row() of train.py makes all rows."""
    rows = [
        make_tasks_row(tokenizer, rng, shares) if shares and rng.random() < TASKS_SHARE else make_row(tokenizer, rng, ROW)
        for _ in range(tokens // ROW)
    ]
    return Batch(torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows]))


def said_most(tokenizer: PreTrainedTokenizerFast, rng: Random, shares: dict[str, float]) -> Tensor:
    """Returns the ids of the DRAFT_TOKENS most frequent tokens in assistants' messages, ascending.

    Counts the tokens of many batches, because the choice of rare tokens would otherwise be random.
    """
    counts = torch.zeros(len(tokenizer), dtype=torch.int64)
    for _ in range(200):
        batch = make_batch(tokenizer, rng, 4096, shares)
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


def tables(ids: Tensor) -> dict[str, Tensor]:
    """Returns d2t (by head id: the target's token id minus the head id) and t2d (by target id: whether the head has it)."""
    known = torch.zeros(1280, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def save_learners(learners: dict[str, nn.Module], ids: Tensor, out: Path) -> None:
    for name, learner in learners.items():
        folder = out / FOLDERS[name]
        if name == "eagle3":
            reads = {"eagle_aux_hidden_state_layer_ids": list(KEPT)}
            config = head_config("LlamaForCausalLMEagle3", draft_vocab_size=len(ids), eagle_config=reads)
            save(learner.state_dict() | tables(ids), config, folder)
        elif name == "mtp":
            named = {f"mtp.{key}": tensor for key, tensor in learner.state_dict().items()}
            save(named, head_config("Qwen3ForCausalLMMtp"), folder)
        else:
            half = Qwen3ForCausalLM(learner.config).to(torch.bfloat16)
            half.load_state_dict(learner.state_dict())
            half.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)


def load_learners(learners: dict[str, nn.Module], ids: Tensor, start: Path) -> None:
    """Loads the weights that save_learners() wrote.

    EAGLE's output head has a row per token. Rows of tokens that the saved head lacks do not change.
    """
    for name, learner in learners.items():
        if name == "draft":
            learner.load_state_dict(Qwen3ForCausalLM.from_pretrained(start / FOLDERS[name], dtype=torch.float32).state_dict())
            continue
        held = {
            key.removeprefix("mtp."): tensor.float() if tensor.is_floating_point() else tensor
            for key, tensor in load_file(start / FOLDERS[name] / "model.safetensors").items()
        }
        if name == "eagle3":
            before = held.pop("d2t")
            place = {token: row for row, token in enumerate((before + torch.arange(len(before))).tolist())}
            kept = [row for row, token in enumerate(ids.tolist()) if token in place]
            rows = learner.lm_head.weight.detach().clone()
            rows[kept] = held["lm_head.weight"][[place[token] for token in ids[kept].tolist()]]
            held["lm_head.weight"] = rows
            del held["t2d"]
        learner.load_state_dict(held)


def new_optimizers(learners: nn.ModuleDict) -> list[torch.optim.Optimizer]:
    """Returns Muon for matrices between embeddings and output heads, as for the demo model, and AdamW for the rest."""
    inner, outer = [], []
    for name, parameter in learners.named_parameters():
        within = parameter.dim() > 1 and not name.endswith(("lm_head.weight", "embed_tokens.weight"))
        (inner if within else outer).append(parameter)
    return [
        torch.optim.Muon(inner, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.02, fused=True),
    ]


def task_shares(text: str) -> dict[str, float]:
    """Parses shares such as copy=4,json=1. Raises ValueError for an unknown task."""
    shares = {name: float(share or 1) for name, _, share in (part.partition("=") for part in text.split(",") if part)}
    if unknown := set(shares) - set(TASKS):
        raise ValueError(f"there are no tasks {', '.join(sorted(unknown))}")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL.parent, help="folder with a subfolder for each drafter")
    parser.add_argument("--start", type=Path, help="folder like --out with the weights to start from")
    parser.add_argument("--only", nargs="+", choices=list(FOLDERS), default=list(FOLDERS), help="models to train (all)")
    parser.add_argument(
        "--tasks",
        type=task_shares,
        default={},
        help="Weights of the tasks from which 75 %% of the rows are drawn, e.g. copy=4,json=1. The other rows are train.py's."
        " Empty: all rows are train.py's.",
    )
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
    ids, teacher = said_most(tokenizer, rng, arguments.tasks), Teacher(target)
    made = {"eagle3": lambda: Eagle3(target, ids), "mtp": Mtp, "draft": small_model}
    learners = nn.ModuleDict({name: made[name]() for name in arguments.only})
    if arguments.start is not None:
        load_learners(dict(learners.items()), ids, arguments.start)
    optimizers = new_optimizers(learners)
    progress = Progress(arguments.steps, arguments.minutes * 60, time.monotonic())
    while (fraction := progress.fraction()) < 1:
        batch = make_batch(tokenizer, rng, arguments.tokens_per_step, arguments.tasks)
        taught = teacher(batch.tokens)
        parts = {
            name: small_loss(learner, taught[2], batch)
            if name == "draft"
            else head_loss(learner, target, taught, batch, ids if name == "eagle3" else None)
            for name, learner in learners.items()
        }
        warm = min(1.0, (progress.step + 1) / 50)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = arguments.peak_rate * warm * 0.5 * (1 + math.cos(math.pi * fraction))
        learners.zero_grad()
        sum(loss for loss, _ in parts.values()).backward()
        for learner in learners.values():
            nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        progress.step += 1
        if progress.step % 10 == 0:
            shares = {name: right for name, (_, right) in parts.items()}
            print(
                json.dumps({"step": progress.step, "seconds": round(time.monotonic() - progress.started), **shares}), flush=True
            )
    save_learners(dict(learners.items()), ids, arguments.out)


if __name__ == "__main__":
    main()

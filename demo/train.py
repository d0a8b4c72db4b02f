"""Trains a demo model on the data of tasks.py and writes its Hugging Face folder, models/demo or models/demo-hybrid.

python demo/train.py --minutes 35
python demo/train.py --hybrid --minutes 85 --tools-share 0.4

The demo model has attention in all layers (Qwen3). The hybrid model has Gated DeltaNet in three of four layers, and a window
in one of the two attention layers (Qwen3.5). Its training begins with the demo model's tokenizer and embeddings.

Training ends after --steps or --minutes, whichever comes first, and the learning rate then reaches zero. An existing tokenizer in
the folder is used again. With --resume, training starts from the existing weights.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tasks import SCRIPTS, TASKS, conversation, sample_training
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_tasks import Message, Tool, long_message, scene, turns_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from window_masks import add_window_masks

MODEL = Path(__file__).resolve().parents[1] / "models/demo"
HYBRID = MODEL.with_name("demo-hybrid")
CONTEXT = 4096
WINDOW = 64  # tokens that the windowed layer of the hybrid model reads
VOCABULARY = 1280
END_OF_DOCUMENT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_MARKS = ("<tool_call>", "</tool_call>")
IGNORED = -100
SHORT_ROW, LONG_ROW = 512, 3072  # tokens of a row
WARMUP_STEPS = 50
TOOLS_SHARE, LONG_MESSAGE_SHARE = 0.55, 0.35
LONGEST_MESSAGE = 180  # largest number of sentences of a message; a sentence has about 16 tokens
# Each conversation draws its number of turns from these numbers.
SHORT_ROW_TURNS, LONG_ROW_TURNS = (1, 1, 1, 1, 1, 1, 2, 2, 3, 4), (1, 1, 1, 2, 2, 3, 4, 6, 12)


@dataclass(frozen=True)
class Batch:
    """The rows of one step."""

    tokens: torch.Tensor  # int64 [rows, length]
    labels: torch.Tensor  # int64 [rows, length]; IGNORED outside assistant turns


@dataclass
class Progress:
    """Progress of the training from 0 to 1: the finished share of the steps or of the time, whichever is larger."""

    steps: int
    seconds: float
    started: float
    step: int = 0

    def fraction(self) -> float:
        return min(1.0, max(self.step / self.steps, (time.monotonic() - self.started) / self.seconds))


# Tokenizer.


def train_tokenizer(rng: Random) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE with all bytes in the vocabulary, so that any UTF-8 text round-trips. Each digit is a token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r" ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+ ?|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CALL_MARKS),
        special_tokens=[END_OF_DOCUMENT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(tokenizer_corpus(rng), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=END_OF_DOCUMENT,
        additional_special_tokens=[START_OF_TURN],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in CALL_MARKS])
    tokenizer.chat_template = (MODEL / "chat_template.jinja").read_text()
    return tokenizer


def tokenizer_corpus(rng: Random) -> Iterator[str]:
    """Yields the texts from which the tokenizer learns its tokens.

    They have fewer characters of SCRIPTS than the training data, so that most of these characters stay split into bytes.
    """
    common = [name for name in TASKS if name != "copy_unicode"]
    for _ in range(30_000):
        yield from sample_training(rng.choice(common), rng)
        yield from ("system", "user", "assistant")
    for letters in SCRIPTS.values():
        yield from (rng.choice(letters) for _ in range(200))


# Data.


def document(rng: Random, turns: int, longest: int, tools_share: float) -> tuple[list[Message], tuple[Tool, ...]]:
    """Returns a conversation and its tools. Some conversations have a long message of up to `longest` sentences; 0: none has."""
    tools: tuple[Tool, ...] = ()
    if rng.random() < tools_share:
        drawn = scene(rng, turns=min(turns, 4))
        messages, tools = drawn.messages(), drawn.tools
    else:
        messages = list(conversation(rng, turns))
    if not longest or rng.random() > LONG_MESSAGE_SHARE:
        return messages, tools
    text = long_message(rng, rng.randint(10, longest))
    if messages[0]["role"] == "system":
        messages = messages[1:]
    if rng.random() < 0.5:
        return [{"role": "system", "content": text}, *messages], tools
    asked = rng.choice([at for at, message in enumerate(messages) if message["role"] == "user"])
    messages[asked] = {"role": "user", "content": f"{text}\n\n{messages[asked]['content']}"}
    return messages, tools


def encode_document(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: tuple[Tool, ...]
) -> tuple[list[int], list[int]]:
    """Returns token ids and labels of a conversation, which ends with END_OF_DOCUMENT.

    The labels are the tokens of the assistant's messages, with END_OF_TURN after each message. A label is at the position of its
    token (not shifted). All other labels are IGNORED.
    """
    tokens: list[int] = []
    labels: list[int] = []
    for role, text in turns_of(messages, tools):
        head = tokenizer.encode(f"{START_OF_TURN}{role}\n")
        body = tokenizer.encode(f"{text}{END_OF_TURN}")
        tail = tokenizer.encode("\n")
        tokens += head + body + tail
        learnt = body if role == "assistant" else [IGNORED] * len(body)
        labels += [IGNORED] * len(head) + learnt + [IGNORED] * len(tail)
    return [*tokens, tokenizer.pad_token_id], [*labels, IGNORED]


def make_row(
    tokenizer: PreTrainedTokenizerFast, rng: Random, length: int, tools_share: float = TOOLS_SHARE
) -> tuple[list[int], list[int]]:
    """Returns the token ids and labels of consecutive conversations, cut at `length` tokens."""
    turns, longest = (LONG_ROW_TURNS, LONGEST_MESSAGE) if length == LONG_ROW else (SHORT_ROW_TURNS, 0)
    tokens: list[int] = []
    labels: list[int] = []
    while len(tokens) < length:
        more_tokens, more_labels = encode_document(tokenizer, *document(rng, rng.choice(turns), longest, tools_share))
        tokens += more_tokens
        labels += more_labels
    return tokens[:length], labels[:length]


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: Random, tokens: int, length: int, tools_share: float) -> Batch:
    """Makes a batch of rows of the given length. Long rows teach the model to ignore unrelated text."""
    rows = [make_row(tokenizer, rng, length, tools_share) for _ in range(max(1, tokens // length))]
    return Batch(torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows]))


# Model.


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def new_hybrid_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
    """Returns a model with the demo model's embeddings and random layers."""
    recurrent = ["linear_attention"] * 3
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=448,
        num_hidden_layers=8,
        layer_types=[*recurrent, "sliding_attention", *recurrent, "full_attention"],
        sliding_window=WINDOW,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    demo = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.model.embed_tokens.load_state_dict(demo.model.embed_tokens.state_dict())
    return model


def loss_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Returns the mean cross-entropy over the labelled tokens. Logits are computed only for positions with a label."""
    hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[:, :-1]
    labels = batch.labels[:, 1:]
    learnt = labels != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learnt]).float(), labels[learnt])


def new_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Returns Muon for the layers' matrices, because it learns more in each step, and AdamW for the other parameters."""
    inner = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": [model.model.embed_tokens.weight], "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(inner, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True),
    ]


def learning_rate(progress: Progress, peak: float) -> float:
    warmup = min(1.0, (progress.step + 1) / WARMUP_STEPS)
    return peak * warmup * 0.5 * (1 + math.cos(math.pi * progress.fraction()))


def train_step(
    model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], batch: Batch, rate: float, autocast: bool
) -> float:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = rate
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = loss_of(model, batch)
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


# Files.


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes weights in bfloat16, config and generation defaults. The dtype of `model` does not change."""
    half = type(model)(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    half.generation_config = GenerationConfig(do_sample=False, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    half.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)


def load_or_train_tokenizer(out: Path, hybrid: bool, seed: int) -> PreTrainedTokenizerFast:
    if (out / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(MODEL) if hybrid else train_tokenizer(Random(seed))
    tokenizer.save_pretrained(out)
    return tokenizer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hybrid", action="store_true", help="train the hybrid model")
    parser.add_argument("--out", type=Path, help="folder of the model; default: models/demo, or models/demo-hybrid")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--tools-share", type=float, default=TOOLS_SHARE, help="share of conversations with tools")
    parser.add_argument("--long-rows-from", type=float, default=0.75, help="share of the run after which all rows are long")
    parser.add_argument("--peak-rate", type=float, default=2e-3)
    parser.add_argument("--resume", action="store_true", help="start from the weights in --out")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    arguments = parser.parse_args()
    arguments.out = arguments.out or (HYBRID if arguments.hybrid else MODEL)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_or_train_tokenizer(arguments.out, arguments.hybrid, arguments.seed)
    if arguments.resume:
        model = AutoModelForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    else:
        model = new_hybrid_model(tokenizer) if arguments.hybrid else new_model(tokenizer)
    model.train()
    add_window_masks(model)
    if arguments.compile and arguments.hybrid:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    elif arguments.compile:
        model.model.compile(dynamic=False)
    optimizers = new_optimizers(model)
    rng = Random(arguments.seed + 1)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)

    progress = Progress(arguments.steps, arguments.minutes * 60, time.monotonic())
    saved, seen, learnt = time.monotonic(), 0, 0
    while (fraction := progress.fraction()) < 1:
        length = LONG_ROW if fraction >= arguments.long_rows_from else SHORT_ROW
        batch = make_batch(tokenizer, rng, arguments.tokens_per_step, length, arguments.tools_share)
        if arguments.hybrid and length == LONG_ROW:
            torch.compiler.set_stance("force_eager")  # the loop over the chunks of a long row takes 8 minutes to compile
        loss = train_step(model, optimizers, batch, learning_rate(progress, arguments.peak_rate), arguments.bf16)
        progress.step += 1
        seen += batch.tokens.numel()
        learnt += int((batch.labels != IGNORED).sum())
        if progress.step % 20 == 0:
            report = {"step": progress.step, "loss": round(loss, 4), "tokens": seen, "learnt": learnt}
            print(json.dumps(report | {"seconds": round(time.monotonic() - progress.started)}), flush=True)
        if time.monotonic() - saved > arguments.save_minutes * 60:
            save_model(model, tokenizer, arguments.out)
            saved = time.monotonic()
    save_model(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()

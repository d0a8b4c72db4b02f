"""A tiny checkpoint that outputs given texts. A selector token in the prompt chooses the text; the rest of the prompt is ignored.

    texts = ["Hello.", '<tool_call>\\n{"name": "read"}\\n</tool_call>']
    write_reciting_model(folder, texts, chat_template=template)
    prompt = f"Recite {selector(1)}"  # if the prompt has several selectors, the last one counts

Each text is cut into pieces, and each piece of each text is a separate, numbered token. The tokenizer's decoder drops the number.
A special token of the vocabulary, such as `<think>`, is not numbered. A numbered token without text comes after it.

The model is a GPT-2 with one layer and without an MLP. Its attention finds the last numbered token, because the score grows with
a flag of such tokens and with the position. The value that it reads there is the code of the next token. If a special token
comes next, the value contains the code of the special token, and half of the code of the numbered token after it. After the
special token, the model reads the same value. The special token then lowers the logits of all special tokens, so that the
numbered token is next. The weights need float32.

Chat templates, tools and reasoning work as for any model. Grammars do not work, because they cannot match numbered pieces.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rootstock_llm.services.shared.output_formats import REASONING_FORMATS, TOOL_FORMATS

END = "<|im_end|>"
STOPS = (END, "<|return|>", "<|call|>")  # tokens that end an output
TEMPLATE_MARKS = ("<|im_start|>", "<|eom_id|>", "<|eot_id|>", "[INST]", "[/INST]")
_FORMAT_MARKS = [mark for formats in (TOOL_FORMATS, REASONING_FORMATS) for marks in formats.values() for mark in marks]
MARKS = tuple(dict.fromkeys((*STOPS, *TEMPLATE_MARKS, *_FORMAT_MARKS)))
PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH, HEADS, CODE = 256, 4, 248  # dimensions of the residual stream; the code uses the first CODE ones
FLAG, SPECIAL, SINE, COSINE = (
    CODE + 2 * at for at in range(4)
)  # pairs of a value and its negative, so that the mean of the stream is 0
MAX_POSITIONS = 4096
LONGEST_PIECE = 6  # largest number of characters of a piece if a text is cut at random
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def selector(text: int | str) -> str:
    """Returns the token that makes the model recite the text of this index."""
    return f"⟦{text}⟧"


def write_reciting_model(
    folder: Path, texts: Sequence[str | Sequence[str]], chat_template: str = PLAIN_TEMPLATE, seed: int = 7
) -> None:
    """Writes config, weights and tokenizer of a model that can output each of the texts.

    Args:
        folder: created if it does not exist.
        texts: an item is a text, which is cut into tokens at random positions, or the list of its tokens. The output ends after
            the text, or earlier at a token of STOPS in the text.
        chat_template: Jinja source.
        seed: seed of the random cuts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _Vocabulary(texts, random.Random(seed))
    _write_tokenizer(folder, vocabulary, chat_template)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": len(vocabulary.tokens),
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_layer": 1,
        "n_inner": 16,
        "n_positions": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": [vocabulary.ids[mark] for mark in STOPS],
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"], "do_sample": False}))
    save_file(_weights(vocabulary), folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class _Step:
    """A numbered token, and the special token after it."""

    token: str
    special: str  # special token between this numbered token and the next one; "" if there is none


class _Vocabulary:
    """All tokens: special tokens, then single characters for prompts, then the numbered tokens of each text."""

    def __init__(self, texts: Sequence[str | Sequence[str]], chooser: random.Random) -> None:
        self.chains = [list(_steps(index, _pieces(text, chooser))) for index, text in enumerate(texts)]
        characters = {chr(code) for code in range(32, 127)} | {"\n", "\t", "\r"}
        characters |= {char for text in texts for piece in text for char in piece}
        numbered = [step.token for chain in self.chains for step in chain]
        self.tokens = [*MARKS, _UNKNOWN, *sorted(characters - {_UNKNOWN}), *numbered]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.selectors = [chain[0].token for chain in self.chains]


def _pieces(text: str | Sequence[str], chooser: random.Random) -> Iterator[str]:
    """Yields the pieces of a text: random ones of a string, or those of a list. Each special token is a separate piece."""
    for given in [text] if isinstance(text, str) else text:
        while given:
            starts = {mark: at for mark in MARKS if (at := given.find(mark)) >= 0}
            mark = min(starts, key=lambda m: (starts[m], -len(m)), default="")
            plain = given[: starts[mark]] if mark else given
            given = given[len(plain) + len(mark) :]
            while plain:
                size = chooser.randint(1, LONGEST_PIECE) if isinstance(text, str) else len(plain)
                yield plain[:size]
                plain = plain[size:]
            if mark:
                yield mark


def _steps(index: int, pieces: Iterator[str]) -> Iterator[_Step]:
    """Yields the numbered tokens of a text in order.

    The first numbered token is the selector. A prompt may end with a special token after the selector, so the text's own special
    tokens never follow the selector directly.
    """
    token, parts = selector(index), [*pieces, END]
    for count, piece in enumerate(["", *parts] if parts[0] in MARKS else parts, 1):
        special = piece if piece in MARKS else ""
        yield _Step(token, special)
        token = selector(f"{index}.{count}") + ("" if special else piece)


def _write_tokenizer(folder: Path, vocabulary: _Vocabulary, chat_template: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocabulary.ids, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex(r"⟦[0-9.]+⟧"), ""), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in vocabulary.selectors])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": chat_template}))


def _weights(vocabulary: _Vocabulary) -> dict[str, np.ndarray]:
    """Returns the weights by transformers' names."""
    codes = np.random.default_rng(11).standard_normal((len(vocabulary.tokens), CODE))
    codes -= codes.mean(1, keepdims=True)
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    tokens = np.zeros((len(vocabulary.tokens), WIDTH))
    heads = np.zeros((len(vocabulary.tokens), WIDTH))
    heads[:, :CODE] = codes
    for mark in MARKS:
        _pair(tokens, vocabulary.ids[mark], SPECIAL, -1)
        _pair(heads, vocabulary.ids[mark], SPECIAL, 1)
    for chain in vocabulary.chains:
        for step, following in zip(chain, [*chain[1:], None], strict=True):
            value = codes[vocabulary.ids[step.special]] if step.special else np.zeros(CODE)
            if following is not None:
                value = value + codes[vocabulary.ids[following.token]] * (0.5 if step.special else 1)
            row = vocabulary.ids[step.token]
            tokens[row, :CODE] = value / np.linalg.norm(value)
            _pair(tokens, row, FLAG, 1)
    angles = (np.arange(MAX_POSITIONS) / MAX_POSITIONS - 0.5) * np.pi / 2
    positions = np.zeros((MAX_POSITIONS, WIDTH))
    for at, (sine, cosine) in enumerate(zip(np.sin(angles), np.cos(angles), strict=True)):
        _pair(positions, at, SINE, sine)
        _pair(positions, at, COSINE, cosine)
    layer = {
        "ln_1.weight": np.ones(WIDTH),
        "ln_1.bias": np.zeros(WIDTH),
        "ln_2.weight": np.ones(WIDTH),
        "ln_2.bias": np.zeros(WIDTH),
        "mlp.c_fc.weight": np.zeros((WIDTH, 16)),
        "mlp.c_fc.bias": np.zeros(16),
        "mlp.c_proj.weight": np.zeros((16, WIDTH)),
        "mlp.c_proj.bias": np.zeros(WIDTH),
        **_attention(),
    }
    out = {
        "transformer.wte.weight": tokens,
        "transformer.wpe.weight": positions,
        "transformer.ln_f.weight": np.ones(WIDTH),
        "transformer.ln_f.bias": np.zeros(WIDTH),
        "lm_head.weight": heads * 30,
        **{f"transformer.h.0.{name}": value for name, value in layer.items()},
    }
    return {name: value.astype(np.float32) for name, value in out.items()}


def _pair(rows: np.ndarray, row: int, at: int, value: float) -> None:
    rows[row, at : at + 2] = value, -value


def _attention() -> dict[str, np.ndarray]:
    """Returns weights with which every head attends to the last numbered token and reads the head's share of the code."""
    per_head = WIDTH // HEADS
    query, key = np.zeros(WIDTH), np.zeros((WIDTH, WIDTH))
    for head in range(HEADS):
        flag, sine = head * per_head, head * per_head + 1
        query[flag], query[sine] = 4e5, 1e5  # weights in the score; the scores of neighbouring positions differ by more than 20
        key[FLAG, flag] = key[SINE, sine] = 1
    reading = np.zeros((WIDTH, WIDTH))
    reading[:CODE, :CODE] = np.eye(CODE) / 6
    return {
        "attn.c_attn.weight": np.concatenate([np.zeros((WIDTH, WIDTH)), key, np.eye(WIDTH)], axis=1),
        "attn.c_attn.bias": np.concatenate([query, np.zeros(2 * WIDTH)]),
        "attn.c_proj.weight": reading,
        "attn.c_proj.bias": np.zeros(WIDTH),
    }

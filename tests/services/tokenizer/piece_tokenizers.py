"""Makes tokenizers for tests of PieceEncoder, one for each of its different ways to cut a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer, load_tokenizer
from tests.services.tokenizer.model_folders import CORPUS, KINDS

LONGEST_BLANKS = 128  # blanks in the longest token of doubling()
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOOKS_BEHIND = r"(?<=a)b|\s+|\S+"
# Training texts, with runs of line ends and blanks
LINES = [*CORPUS, *("\n" * n + " " * n for n in range(1, 40))]


def split_by(pattern: str) -> Tokenizer:
    """Makes a byte-level BPE tokenizer with NFC and a pattern, as newer models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=["<s>"]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_greedy_tokens() -> Tokenizer:
    """Makes a tokenizer with added tokens that absorb blanks around them, or that must be whole words."""
    tokenizer = split_by(CL100K)
    tokenizer.add_tokens([AddedToken("<r>", rstrip=True), AddedToken("<l>", lstrip=True), AddedToken("the", single_word=True)])
    return tokenizer


def doubling(byte_level: bool) -> Tokenizer:
    """Makes a BPE tokenizer with tokens of 2, 4, … LONGEST_BLANKS blanks."""
    blank = "Ġ" if byte_level else "▁"
    vocab = {char: at for at, char in enumerate(sorted({*pre_tokenizers.ByteLevel.alphabet(), blank}))}
    merges, run = [], blank
    while len(run) < LONGEST_BLANKS:
        merges.append((run, run))
        run += run
        vocab[run] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _of(make: Callable[[], Tokenizer]) -> Callable[[Path], HfTokenizer]:
    return lambda _: HfTokenizer(make(), {}, {})


def _of_folder(kind: str) -> Callable[[Path], HfTokenizer]:
    return lambda root: load_tokenizer(KINDS[kind](root / kind))


MAKERS: Mapping[str, Callable[[Path], HfTokenizer]] = {
    **{kind: _of_folder(kind) for kind in KINDS},
    "split by a pattern": _of(lambda: split_by(CL100K)),
    "tokens that look at neighbours": _of(with_greedy_tokens),
    "a pattern that looks behind": _of(lambda: split_by(LOOKS_BEHIND)),
    "blanks in bytes": _of(lambda: doubling(True)),
    "blanks in one word": _of(lambda: doubling(False)),
}

"""Reads the operator's corpus for n-gram drafts, a file of texts, into one array of token ids when the worker starts."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rootstock_llm.services.shared import limits
from rootstock_llm.services.worker.core.contracts.plan import I32
from rootstock_llm.services.worker.exec.contracts.drafter import BETWEEN_TEXTS
from rootstock_llm.services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

SETTING = "--speculative-ngram-external-corpus-path"
PIECE_CHARS = 1 << 16  # longer texts are encoded in pieces of at most this many characters, which limits memory
BATCH_PIECES = 64  # pieces per call of the tokenizer

Encode = Callable[[Sequence[str], bool], Sequence[Sequence[int]]]


def draft_corpus(settings: WorkerSettings, encode: Callable[[], Encode]) -> I32 | None:
    """Returns the token ids of the corpus, or None if no file is set.

    Args:
        encode: returns the tokenizer's function (texts, with special tokens) -> token ids. It is called only if there is a file.

    Returns:
        int32[n], with BETWEEN_TEXTS between texts.

    Raises:
        ValueError: speculative_algorithm is not ngram, or the file is missing, unreadable, malformed, empty or too large.
    """
    path = settings.speculative_ngram_external_corpus_path
    if not path:
        return None
    if settings.speculative_algorithm != "ngram":
        raise ValueError(f"{SETTING} has no effect with --speculative-algorithm {settings.speculative_algorithm}")
    pieces, encoder = _pieces(_texts(Path(path))), encode()
    limit, tokens = settings.speculative_ngram_external_corpus_max_tokens, array("i")
    while batch := list(islice(pieces, BATCH_PIECES)):
        for (is_first, _), ids in zip(batch, encoder([piece for _, piece in batch], False), strict=True):
            if is_first and tokens:
                tokens.append(BETWEEN_TEXTS)
            tokens.extend(ids)
        if len(tokens) > limit:
            raise ValueError(f"{SETTING}: {path} has more than {limit} tokens (--speculative-ngram-external-corpus-max-tokens)")
    if not tokens:
        raise ValueError(f"{SETTING}: {path} has no text")
    logger.info("n-gram drafts also use the corpus %s, which has %d tokens", path, len(tokens))
    return np.array(tokens, dtype=np.int32)


def _texts(path: Path) -> Iterator[str]:
    """Yields the texts of the file: one per non-empty line of a .jsonl file, else the whole content.

    Raises ValueError if the file cannot be read or a line is invalid.
    """
    text = _content(path)
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _record(line, f"{SETTING}: line {number} of {path}")


def _content(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{SETTING}: {path} does not exist or is not a file")
    try:
        with path.open("rb") as file:
            content = file.read(limits.MAX_CORPUS_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{SETTING}: {path} cannot be read: {error}") from error
    if len(content) > limits.MAX_CORPUS_BYTES:
        raise ValueError(f"{SETTING}: {path} is larger than {limits.MAX_CORPUS_BYTES >> 20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{SETTING}: {path} is not UTF-8 at byte {error.start}") from None


def _record(line: str, where: str) -> str:
    """Returns the text of a line: a JSON string as in SGLang, or the `text` of an object as in data sets.

    Raises ValueError if the line is neither.
    """
    try:
        record: Any = json.loads(line)
    except ValueError:
        raise ValueError(f"{where} is not JSON") from None
    text = record.get("text") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise ValueError(f"{where} must be a string, or an object whose field 'text' is a string")
    return text


def _pieces(texts: Iterator[str]) -> Iterator[tuple[bool, str]]:
    """Cuts texts into pieces of at most PIECE_CHARS characters, if possible after a line break.

    Yields (whether the piece is the first of its text, piece).
    """
    for text in texts:
        begin = 0
        while begin < len(text):
            end = begin + PIECE_CHARS
            if end < len(text):
                end = text.rfind("\n", begin, end) + 1 or end
            yield begin == 0, text[begin:end]
            begin = end

"""How many tokens a text has at least, without encoding it: every byte is in some token, and no token has more bytes than the
longest one that this byte is in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.shared.hf_tokenizer import HfTokenizer

SLICE_CHARS = 1 << 18
_METASPACE = "▁"
_DENOMINATOR = 1 << 40


class FewestTokens:
    """Of any text. 0 where normalization or the model may leave characters out."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._ascii_alone = False  # characters that normalization may join count nothing
        # [256]: of each byte, what one of it adds, in 1 / _DENOMINATOR tokens, rounded down
        self._shares: NDArray[np.int64] = np.zeros(256, np.int64)
        if self._counts(tokenizer):
            self._shares = _shares(tokenizer)

    def of(self, text: str) -> int:
        if not self._shares.any():
            return 0
        counts = np.zeros(256, np.int64)
        for at in range(0, len(text), SLICE_CHARS):
            data = np.frombuffer(text[at : at + SLICE_CHARS].encode(), np.uint8)
            if self._ascii_alone:
                ascii_ = data < 0x80
                data = data[:-1][ascii_[:-1] & ascii_[1:]]
            counts += np.bincount(data, minlength=256)
        return -(-sum(int(count) * int(share) for count, share in zip(counts, self._shares, strict=True)) // _DENOMINATOR)

    def _counts(self, tokenizer: HfTokenizer) -> bool:
        model, kept = tokenizer.inner.model, True
        for kind in _kinds(tokenizer.inner.normalizer):
            self._ascii_alone |= kind in ("NFC", "NFKC", "NFD", "NFKD")
            kept &= kind in ("NFC", "NFKC", "NFD", "NFKD", "Prepend", "Replace ▁")
        for kind in _kinds(tokenizer.inner.pre_tokenizer):
            kept &= kind in ("ByteLevel", "Metaspace", "Digits", "Split Isolated")
        whole = tokenizer.is_byte_level or getattr(model, "byte_fallback", False)
        return kept and whole and type(model).__name__ == "BPE"


def _shares(tokenizer: HfTokenizer) -> NDArray[np.int64]:
    longest, alone = [0] * 256, set()
    for data in _token_bytes(tokenizer):
        if len(data) == 1:
            alone.add(data[0])
        for byte in set(data):
            longest[byte] = max(longest[byte], len(data))
    for token in tokenizer.inner.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip:
            alone -= {byte for byte in range(256) if byte >= 0x80 or chr(byte).isspace()}
    # A byte that is no token of its own may have none at all.
    return np.array([_DENOMINATOR // longest[byte] if byte in alone else 0 for byte in range(256)], np.int64)


def _token_bytes(tokenizer: HfTokenizer) -> Iterator[bytes]:
    """Of every token what it may stand for."""
    for token in tokenizer.inner.get_added_tokens_decoder().values():
        yield token.content.encode()
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.inner.id_to_token(token_id)
        if text is None:
            continue
        if tokenizer.is_byte_level:
            yield tokenizer.token_bytes(token_id) or b""
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            yield bytes([int(text[3:5], 16)])
        else:
            yield text.encode()
            yield text.replace(_METASPACE, " ").encode()


def _kinds(step: Any) -> Iterator[str]:
    """Of a normalizer or pre-tokenizer: the kinds of its steps."""
    waiting = [] if step is None else [json.loads(step.__getstate__())]
    while waiting:
        spec = waiting.pop()
        if spec["type"] == "Sequence":
            waiting += spec.get("normalizers") or spec.get("pretokenizers") or []
        elif spec["type"] == "Split":
            yield f"Split {'Isolated' if not spec['invert'] else 'inverted'}" if spec["behavior"] != "Removed" else "removed"
        elif spec["type"] == "Replace":
            yield "Replace " + spec["content"] if spec["pattern"] == {"String": " "} else "Replace"
        else:
            yield spec["type"]

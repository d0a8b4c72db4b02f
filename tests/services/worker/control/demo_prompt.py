"""A prompt that asks the demo model to count, so that its completion has many different tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"


def counting() -> list[int]:
    """Returns the prompt ids of a chat that asks for a count."""
    text = "<|im_start|>user\nCount from 21 to 40.<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids
    return ids

"""Joins many constants into one node. Constants with a common beginning share it, so that it is compiled only once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from services.worker.grammar.schema.ebnf import Node, Ref, Seq, Text, choice

FEW = 16  # number of constants up to which nothing is shared
MAX_DEPTH = 64  # nested common beginnings


def any_of(texts: Sequence[str], define: Callable[[Node], Ref], depth: int = 0) -> Node:
    """Returns a node that matches exactly these texts.

    Args:
        define: makes a rule of a node.
        depth: number of common beginnings around these texts.
    """
    distinct = sorted(set(texts))
    if len(distinct) <= FEW or depth == MAX_DEPTH:
        return choice(Text(text) for text in dict.fromkeys(texts))
    length = _shared(distinct[0], distinct[-1])
    rests = itertools.groupby((text[length:] for text in distinct), key=lambda rest: rest[:1])
    node = define(choice([any_of(list(group), define, depth + 1) for _, group in rests]))
    return Seq((Text(distinct[0][:length]), node)) if length else node


def _shared(first: str, last: str) -> int:
    """Returns the length of the common beginning of the first and last of sorted texts, which all texts between them share."""
    return next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))

"""Many constants as one node: those that begin alike share their beginning, so that the compiler makes each place of it once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from services.worker.grammar.schema.ebnf import Node, Ref, Seq, Text, choice

FEW = 16  # constants: as they are
MAX_DEPTH = 64  # of beginnings within beginnings


def any_of(texts: Sequence[str], define: Callable[[Node], Ref], depth: int = 0) -> Node:
    """Matches exactly these texts. define: makes a rule of a node."""
    distinct = sorted(set(texts))
    if len(distinct) <= FEW or depth == MAX_DEPTH:
        return choice(Text(text) for text in dict.fromkeys(texts))
    length = _shared(distinct[0], distinct[-1])
    rests = itertools.groupby((text[length:] for text in distinct), key=lambda rest: rest[:1])
    node = define(choice([any_of(list(group), define, depth + 1) for _, group in rests]))
    return Seq((Text(distinct[0][:length]), node)) if length else node


def _shared(first: str, last: str) -> int:
    """Characters that they begin with alike; of sorted texts, all between them do."""
    return next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))

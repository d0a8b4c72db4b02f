"""Log probabilities as they come from a worker, packed: one row per token, in the order of the tokens.

A prompt of many tokens has millions of values; as Python objects they would take fifty times the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rootstock.v1 import worker_pb2


class TokenLogprob(NamedTuple):
    """Of one token (natural logarithms): its own, the top ones in falling order, and those of the ids that were asked for by
    id (SamplingParams.logprobs.token_ids), in their order."""

    value: float
    top_ids: Sequence[int]
    top_values: Sequence[float]
    chosen_values: Sequence[float]


def values_per_token(top: int, chosen: int) -> int:
    return 1 + top + chosen


class LogprobTable:
    """Four bytes a number. All rows have as many top and chosen values as the first."""

    __slots__ = ("_chosen", "_k", "_per_row", "_top_ids", "_top_values", "_values")

    def __init__(self) -> None:
        self._values = array("f")  # [tokens]
        self._top_ids = array("I")  # [tokens, k]
        self._top_values = array("f")  # [tokens, k]
        self._chosen = array("f")  # [tokens, per_row]
        self._k = 0
        self._per_row = 0

    def __len__(self) -> int:
        return len(self._values)

    def extend(self, rows: worker_pb2.LogprobRows) -> None:
        """Raises ValueError for arrays that do not fit each other, or the rows before them."""
        count = len(rows.values)
        per_row = len(rows.chosen_values) // count if count else 0
        if not self._values:
            self._k, self._per_row = rows.k, per_row
        shape = (len(rows.top_ids), len(rows.top_values), len(rows.chosen_values))
        if shape != (count * self._k, count * self._k, count * self._per_row):
            raise ValueError("log probabilities whose arrays do not fit")
        self._values.extend(rows.values)
        self._top_ids.extend(rows.top_ids)
        self._top_values.extend(rows.top_values)
        self._chosen.extend(rows.chosen_values)

    def span(self, begin: int, end: int) -> LogprobSpan:
        """Of the rows from begin to end, as far as there are any; rows that come later are not in it."""
        return LogprobSpan(self, min(begin, len(self)), min(end, len(self)))

    def rows(self, begin: int) -> worker_pb2.LogprobRows:
        """Those from begin on, as extend() takes them."""
        tops, chosen = slice(begin * self._k, None), slice(begin * self._per_row, None)
        return worker_pb2.LogprobRows(
            values=self._values[begin:],
            k=self._k,
            top_ids=self._top_ids[tops],
            top_values=self._top_values[tops],
            chosen_values=self._chosen[chosen],
        )

    def row(self, index: int) -> TokenLogprob:
        tops = slice(index * self._k, (index + 1) * self._k)
        chosen = self._chosen[index * self._per_row : (index + 1) * self._per_row]
        return TokenLogprob(self._values[index], self._top_ids[tops], self._top_values[tops], chosen)


class LogprobSpan:
    """Consecutive rows of a table, made into objects one at a time."""

    __slots__ = ("_begin", "_end", "_table")

    def __init__(self, table: LogprobTable, begin: int, end: int) -> None:
        self._table = table
        self._begin = begin
        self._end = end

    def __len__(self) -> int:
        return max(0, self._end - self._begin)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(self._table.row, range(self._begin, self._end))

"""Log probabilities of a choice as packed arrays, with one row per token.

A long prompt has millions of values. As Python objects, they would need 50 times the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rootstock_llm.protos import worker_pb2


class LogprobRow(NamedTuple):
    """The log probabilities at one token, as natural logarithms."""

    value: float  # log probability of the token itself
    top_ids: Sequence[int]  # ids of the most likely tokens, in descending order of probability
    top_values: Sequence[float]  # log probabilities of top_ids
    chosen_values: Sequence[float]  # log probabilities of the ids in SamplingParams.logprobs.token_ids, in that order


def values_per_token(top: int, chosen: int) -> int:
    """Returns the number of log probabilities of one token: its own, `top` most likely tokens and `chosen` requested ids."""
    return 1 + top + chosen


class LogprobTable:
    """Rows of log probabilities, with 4 bytes per value. All rows have the same numbers of top and chosen values."""

    __slots__ = ("_chosen", "_k", "_per_row", "_top_ids", "_top_values", "_values")

    def __init__(self) -> None:
        self._values = array("f")  # [tokens]
        self._top_ids = array("I")  # [tokens, k]
        self._top_values = array("f")  # [tokens, k]
        self._chosen = array("f")  # [tokens, per_row]
        self._k = 0  # top values per row
        self._per_row = 0  # chosen values per row

    def __len__(self) -> int:
        return len(self._values)

    def extend(self, rows: worker_pb2.LogprobRows) -> None:
        """Adds rows. Raises ValueError if the arrays have unequal numbers of rows, or other columns than the earlier rows."""
        count = len(rows.values)
        per_row = len(rows.chosen_values) // count if count else 0
        if not self._values:
            self._k, self._per_row = rows.k, per_row
        shape = (len(rows.top_ids), len(rows.top_values), len(rows.chosen_values))
        if shape != (count * self._k, count * self._k, count * self._per_row):
            raise ValueError(f"log probabilities of {count} tokens have arrays of wrong lengths: {shape}")
        self._values.extend(rows.values)
        self._top_ids.extend(rows.top_ids)
        self._top_values.extend(rows.top_values)
        self._chosen.extend(rows.chosen_values)

    def span(self, begin: int, end: int) -> LogprobSpan:
        """Returns the rows from `begin` to `end`, exclusive. Does not include rows that are added later."""
        return LogprobSpan(self, min(begin, len(self)), min(end, len(self)))

    def rows(self, begin: int) -> worker_pb2.LogprobRows:
        """Returns the rows from `begin` on as a message for extend()."""
        tops, chosen = slice(begin * self._k, None), slice(begin * self._per_row, None)
        return worker_pb2.LogprobRows(
            values=self._values[begin:],
            k=self._k,
            top_ids=self._top_ids[tops],
            top_values=self._top_values[tops],
            chosen_values=self._chosen[chosen],
        )

    def row(self, index: int) -> LogprobRow:
        tops = slice(index * self._k, (index + 1) * self._k)
        chosen = self._chosen[index * self._per_row : (index + 1) * self._per_row]
        return LogprobRow(self._values[index], self._top_ids[tops], self._top_values[tops], chosen)


class LogprobSpan:
    """Consecutive rows of a table. Iterating makes one LogprobRow at a time."""

    __slots__ = ("_begin", "_end", "_table")

    def __init__(self, table: LogprobTable, begin: int, end: int) -> None:
        self._table = table
        self._begin = begin
        self._end = end

    def __len__(self) -> int:
        return max(0, self._end - self._begin)

    def __iter__(self) -> Iterator[LogprobRow]:
        return map(self._table.row, range(self._begin, self._end))


EMPTY_TABLE = LogprobTable()  # shared by choices without log probabilities; no code adds rows to it
NO_LOGPROBS = LogprobSpan(EMPTY_TABLE, 0, 0)

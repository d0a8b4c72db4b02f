"""Declares the drafter, which proposes the next tokens of a slot, and the model that a drafter may compute them with.

Draft tokens change the speed of decoding and never its output. A draft model keeps one entry per position of a slot: its own KV.
Entries are in a pool of the draft model whose pages have the numbers of the target's pages. One thread at a time calls the
model, which holds no state of requests. Letters in shapes: T tokens of a pass, W wanted tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rootstock_llm.services.worker.core.contracts.plan import SlotParams

if TYPE_CHECKING:
    from torch import Tensor

    from rootstock_llm.kernels.contracts.ops import RaggedRows
    from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool, LayerKV

BETWEEN_TEXTS = -1  # separates texts in an array of token ids
Kept = tuple["Tensor", ...]  # hidden states of the target, one tensor per layer that the drafter reads


@dataclass(frozen=True, slots=True)
class Computed:
    """Positions start .. start + count - 1 of a slot, whose KV the target has computed."""

    slot: int
    start: int
    count: int
    # [count, H] each, owned by the receiver, None if the step ran in several passes, or if the drafter reads no states
    kept: Kept | None
    given: bool  # the tokens are from the plan and were not sampled


class Drafter(Protocol):
    """A drafter of one executor.

    All calls come from the thread that launches steps, on the forward stream, in the order of the steps. Within a step, the calls
    have the order of the methods below. There is one exception: sampled() and the second computed() of a step may follow the
    begin() of the next step, if that step requests no draft tokens.

    Drafter and target share the page table: a page holds the drafter's entries for the tokens whose KV the target has in it. If
    the request in a slot wants no draft tokens, the drafter gets no calls for the slot until another request is admitted to it.
    """

    def begin(self) -> None:
        """Prepares for a step. Slots and pages are still those of the step before."""

    def admit(self, slot: SlotParams) -> None:
        """Replaces the request in a slot. The history of the new request becomes the slot's text."""

    def know(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """Sets the slot's tokens from position `start` on to `ids`, and drops the tokens after them."""

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Returns draft tokens per slot.

        The page table already has the pages for them.

        Args:
            wanted: largest number of draft tokens per slot.
        """

    def predicted(self, slot: int) -> bool:
        """Returns whether the slot's last draft tokens are from the client's prediction."""

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        """Appends sampled tokens to the slot's text. All of them but the last equal the draft tokens."""

    def computed(self, rows: Sequence[Computed]) -> None:
        """Reports positions that the target has computed.

        It is called twice per step: with the rows whose tokens the plan gave, as soon as sampling is launched; and with the other
        rows, as soon as their sampled tokens are on the host.
        """


class DraftModel(Protocol):
    """A model that computes entries and draft tokens.

    With shift 1, entry p is computed from the token at position p + 1 and from the target's hidden state at p. With shift 0, it
    is computed from the token at p only.
    """

    shift: int  # distance from an entry's position to its token: 0 or 1
    layers: tuple[LayerKV, ...]  # KV of an entry, per layer
    max_context: int  # largest number of entries of a slot

    def forward(self, ids: Tensor, states: Tensor | None, rows: RaggedRows, pool: KVPool) -> None:
        """Computes entries and writes them to the pool.

        Args:
            ids: int64[T], tokens of the target's vocabulary.
            states: [T, H] from entry() or draft(), None if shift is 0.
        """

    def entry(self, kept: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the input states [T, H] for the hidden states that the target kept of T tokens, None if shift is 0."""

    def draft(self, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the most likely tokens after wanted entries of the last pass, and the states for the entries of these tokens.

        Tokens are int64[W], states [W, H] or None if shift is 0. Both are valid until the next pass.

        Args:
            wanted: int64[W], indices into the T tokens of the pass.
        """

"""Declares the drafter, which proposes draft tokens for a slot, and the draft model that a drafter may use.

Draft tokens change the speed of decoding and never its output. An entry is the draft model's KV for one position of a slot.
Entries are in a separate pool, whose page ids are those of the target model's pool. One thread at a time calls the draft model,
which has no state of requests. Letters in shapes: T tokens of a pass, W tokens whose draft tokens are requested, H hidden size.
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
    """The positions start .. start + count - 1 of a slot, whose KV the target model has computed."""

    slot: int
    start: int
    count: int
    # Hidden states of the positions, [count, H] each, owned by the receiver; or None if the step ran in several passes, or if the
    # drafter reads no hidden states.
    kept: Kept | None
    given: bool  # whether the plan had the tokens; otherwise they were sampled


class Drafter(Protocol):
    """A drafter of one executor.

    All calls come from the thread that launches steps, on the forward stream, in the order of the steps. Within a step, the calls
    have the order of the methods below. There is one exception: sampled() and the second computed() of a step may follow the
    begin() of the next step, if that step requests no draft tokens.

    Drafter and target share the page table: the drafter's page of an id has the entries for the same tokens as the target's page
    of this id. If the request in a slot gets no draft tokens, the drafter gets no calls for the slot until another request is
    admitted to it.
    """

    def begin(self) -> None:
        """Prepares for a step. Slots and pages are still those of the previous step."""

    def admit(self, slot: SlotParams) -> None:
        """Replaces the request in a slot. The history of the new request becomes the slot's text."""

    def know(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """Sets the slot's tokens from position `start` on to `ids`, and drops the tokens after them."""

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Returns draft tokens per slot. The page table already has the pages for them.

        Args:
            wanted: largest number of draft tokens per slot.
        """

    def predicted(self, slot: int) -> bool:
        """Returns whether the slot's last draft tokens are from the client's prediction."""

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        """Appends sampled tokens to the slot's text. All sampled tokens except the last equal the draft tokens."""

    def computed(self, rows: Sequence[Computed]) -> None:
        """Reports positions that the target has computed.

        It is called twice per step:

        1. with the rows whose tokens are in the plan, as soon as sampling is launched
        2. with the other rows, as soon as their sampled tokens are on the host
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
        """Returns the input states [T, H] for `kept`, hidden states of T tokens of the target, or None if shift is 0."""

    def draft(self, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the most likely token after each of the wanted tokens of the last pass, and the input states for their entries.

        The tokens are int64[W]. The states are [W, H], or None if shift is 0. Both are valid until the next pass.

        Args:
            wanted: int64[W], indices into the T tokens of the pass.
        """

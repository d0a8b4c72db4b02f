"""Declares the drafter, which proposes draft tokens for a slot, and the draft model that a drafter may use.

Draft tokens change the speed of decoding and never the output. The target is the model whose output the client receives. An entry
is the draft model's KV for one position of a slot. Entries are in a separate pool, whose page ids are those of the target's pool.
One thread at a time calls the draft model, which stores nothing about a request outside that pool. Letters in shapes: T tokens of
a pass, W tokens after which draft tokens are requested, H hidden size.
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
HiddenStates = tuple["Tensor", ...]  # hidden states of the target, one tensor [tokens, H] per layer that the drafter reads


@dataclass(frozen=True, slots=True)
class Computed:
    """The positions start .. start + count - 1 of a slot, whose KV the target model has computed."""

    slot: int
    start: int
    count: int
    # Hidden states of the positions, [count, H] each, owned by the receiver. None if the step ran in several passes, or if the
    # drafter reads no hidden states.
    hidden: HiddenStates | None
    from_plan: bool  # whether the plan had the tokens of these positions; False if they were sampled


class Drafter(Protocol):
    """A drafter of one executor.

    All calls come from the thread that launches steps, on the forward stream, in the order of the steps. Within a step, the calls
    have the order of the methods below. There is one exception: if the next step requests no draft tokens, sampled() and the
    second computed() of a step may follow the begin() of the next step.

    Drafter and target share the page table: page i of the draft model's pool has the entries for the tokens of page i of the
    target's pool. A drafter is called only for slots whose request was admitted with SlotParams.drafted_for.
    """

    def begin(self) -> None:
        """Starts a step, before the admissions and page-table updates of the step are applied."""

    def admit(self, slot: SlotParams) -> None:
        """Replaces the request in a slot. The history of the new request becomes the slot's text."""

    def set_tokens(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """Sets the slot's tokens from position `start` on to `ids`, and drops the tokens after them."""

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Returns draft tokens per slot. The page table already has the pages for them.

        Args:
            wanted: largest number of draft tokens per slot.
        """

    def used_prediction(self, slot: int) -> bool:
        """Returns whether the slot's last draft tokens are from the client's prediction."""

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        """Appends the tokens of one step to the slot's text: the accepted draft tokens, then the token sampled after them."""

    def computed(self, rows: Sequence[Computed]) -> None:
        """Reports positions that the target has computed.

        It is called twice per step:

        1. with the rows whose tokens are in the plan, as soon as sampling is launched
        2. with the rows whose tokens were sampled, as soon as these tokens are on the host
        """


class DraftModel(Protocol):
    """A model that computes entries, and draft tokens from them.

    With shift 1, entry p is computed from the token at position p + 1 and from the target's hidden state at p. With shift 0, it
    is computed from the token at p only.
    """

    shift: int  # distance from an entry's position to its token: 0 or 1
    layers: tuple[LayerKV, ...]  # size of an entry's KV in each layer
    max_context: int  # largest number of entries of a slot

    def forward(self, ids: Tensor, states: Tensor | None, rows: RaggedRows, pool: KVPool) -> None:
        """Computes entries and writes them to the pool.

        Args:
            ids: int64[T], tokens of the target's vocabulary.
            states: [T, H] from entry() or draft(), None if shift is 0.
        """

    def entry(self, hidden: HiddenStates) -> Tensor | None:
        """Returns the input states [T, H] that forward() needs for T tokens of the target with these hidden states.

        Returns:
            None if shift is 0.
        """

    def draft(self, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Drafts one token after each of the wanted tokens of the last pass.

        Returns:
            The most likely tokens, int64[W], and the states with which forward() computes the entries of these tokens, [W, H], or
            None if shift is 0. Both are valid until the next pass.

        Args:
            wanted: int64[W], indices into the T tokens of the pass.
        """

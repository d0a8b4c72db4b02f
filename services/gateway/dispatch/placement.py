"""Where one choice is: its pool, its worker, perhaps a copy on a second one, and what workers have done with it.

A choice that is slow to begin may get a copy on another worker; the first of the two to say something keeps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.dispatch.model_pool import ModelPool, PromptBlocks, reads
from services.gateway.dispatch.wait import Wait
from services.gateway.peers.weights import Weights
from services.gateway.peers.worker_link import WorkerLink
from services.gateway.request.choice_output import Progress
from services.gateway.request.request import Choice

Link: TypeAlias = "WorkerLink[Placement]"
Pool: TypeAlias = "ModelPool[Placement]"


@dataclass(frozen=True, slots=True)
class Hedge:
    """The copy. The placement's own link, handle, weights and numerics are the original's."""

    link: Link
    handle: int
    weights: Weights | None
    numerics: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Pages that the link's worker keeps of what it has handed over, as `handle`: where they are read, and their layout."""

    link: Link
    handle: int
    source: worker_pb2.KvSource
    layout: bytes

    def leave(self) -> None:
        """Nobody will come for them."""
        self.link.leave_room(self.handle)


@dataclass(frozen=True, slots=True)
class Ahead:
    """The link's worker reads pages of a prompt that another one still computes, and counts on it. handle: of its submit, if it
    is the one that goes on. predicted_tokens: that it was thought to have cached before."""

    link: Link
    handle: int
    pool: Pool
    predicted_tokens: int

    @property
    def stands(self) -> bool:
        return self.link.reads_ahead(self.handle)

    def leave(self) -> None:
        """It is not, or nobody goes on."""
        self.link.leave_prefetch(self.handle)
        self.pool.recount(self.link)


@dataclass(slots=True)
class Home:
    """The worker with the shared pages of a score request. Its items go there while the worker has free slots."""

    link: Link | None = None  # None until the first item has a worker


def numerics_of(link: Link | None) -> str:
    """Fingerprint of what decides its results' bits beside the weights; "" where these may differ from one time to the next."""
    return "" if link is None or link.info is None else link.info.numerics


class Placement:
    """wait: its time without a worker. weights: that its output comes from, or will; None while it was placed nowhere.
    numerics: fingerprint of what its output began with; "" for none that anybody has promised.
    placed_at: when its worker got it, 0.0 while none has. predicted_tokens: of its prompt, that its worker was thought to have
    cached. crashes: workers lost soon after they got it. refused_by: addresses of workers that would not or could not serve it.
    prefilled: another worker has computed its prompt for the next one that it goes to. retried: elsewhere, after a worker's
    fault. blocks: shared by all choices of a prompt. batch: a number of the request's own where it has several prompts, or 0."""

    __slots__ = (
        "_ahead",
        "_hedge_timer",
        "_kept",
        "_taken",
        "batch",
        "blocks",
        "choice",
        "crashes",
        "handle",
        "hedge",
        "home",
        "link",
        "numerics",
        "placed_at",
        "pool",
        "predicted_tokens",
        "prefilled",
        "refused_by",
        "retried",
        "wait",
        "weights",
    )

    def __init__(
        self,
        choice: Choice,
        pool: Pool,
        blocks: PromptBlocks,
        refused_by: Collection[str] = (),
        batch: int = 0,
        home: Home | None = None,
    ) -> None:
        """All items of a score request share one home. Other requests have None."""
        self.choice = choice
        self.batch = batch
        self.home = home
        self.pool = pool
        self.blocks = blocks
        self.wait = Wait()
        self.link: Link | None = None
        self.handle = 0  # on the worker's stream; a new one with every submit
        self.weights: Weights | None = None
        self.numerics = ""
        self.placed_at = 0.0
        self.predicted_tokens = 0
        self.hedge: Hedge | None = None
        self._hedge_timer: asyncio.TimerHandle | None = None  # runs until a copy is made
        self.crashes = 0
        self.refused_by = set(refused_by)
        self.retried = False
        self.prefilled = False
        self._ahead: dict[int, Ahead] = {}  # by the handle under which its prompt is computed; 0: it has been
        self._kept: Kept | None = None
        self._taken: tuple[int, Kept] | None = None  # by the submit of this handle

    def resume(self, progress: Progress) -> None:
        """Its output is of what another gateway's worker had."""
        self.weights = None if progress.weights is None else Weights(*progress.weights)
        self.numerics = progress.numerics

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.choice.prompt.ids

    @property
    def prediction_ids(self) -> Sequence[int]:
        return self.choice.part.prediction or ()

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return len(self.choice.prompt.ids) + len(self.choice.output.ids)

    @property
    def token_ids(self) -> Sequence[int]:
        return [*self.choice.prompt.ids, *self.choice.output.ids]

    @property
    def has_begun(self) -> bool:
        """There is output, which is of its weights."""
        return bool(self.choice.output.ids)

    @property
    def changes_numerics(self) -> bool:
        """What has begun goes on with other bits than its worker has promised."""
        return self.has_begun and self.numerics not in ("", numerics_of(self.link))

    @property
    def routing_key(self) -> str:
        return self.choice.generation.routing_key

    @property
    def is_scored(self) -> bool:
        return bool(self.choice.generation.sampling.HasField("score"))

    @property
    def in_session(self) -> bool:
        return self.choice.generation.session is not None

    def write_sampling(self, into: pb.SamplingParams, ends_with_prompt: bool) -> None:
        """ends_with_prompt: of the worker, see WorkerInfo. An older one makes a token for a request for none; it is not shown."""
        self.choice.sampling.write(into)
        if ends_with_prompt and self.choice.generation.hidden:
            into.max_new_tokens = 0

    def aborted(self, handle: int) -> None:
        if self.choice.trace is not None:
            self.choice.trace.aborted(handle)

    def lost(self, handle: int, heard: bool) -> None:
        """heard: the worker had been told of it, and may have begun to read what it was to read: nobody else will."""
        if self._taken is not None and self._taken[0] == handle:
            kept, self._taken = self._taken[1], None
            if heard:
                kept.leave()
            else:
                self._kept, self.prefilled = kept, True
        if self.choice.trace is not None:
            self.choice.trace.lost(handle)

    def place(self, link: Link, handle: int, predicted_tokens: int, now: float) -> None:
        """The link gets it."""
        self.link, self.handle = link, handle
        self.placed_at, self.predicted_tokens = now, predicted_tokens
        if self.home is not None:
            self.home.link = link
        if not self.has_begun:
            self.weights, self.numerics = link.weights, numerics_of(link)

    def leave(self) -> None:
        """Its worker has ended it, or is gone, and no copy goes on."""
        self.link = None
        self.cancel_hedge()
        self._leave_ahead()

    def withdraw(self) -> list[Link]:
        """From wherever it is. Returns the links that have lost it, or that it was to come to."""
        if self._kept is not None:
            self._kept.leave()
            self._kept = None
        copy, link = self.cancel_hedge(), self.link
        if link is not None:
            self.link = None
            self._abort(link, self.handle)
        readers = [ahead.link for ahead in self._ahead.values()]
        self._leave_ahead()
        return [each for each in (copy, link, *readers) if each is not None]

    def hedge_after(self, seconds: float, make: Callable[[], None]) -> None:
        self._hedge_timer = asyncio.get_running_loop().call_later(seconds, make)

    def copy_to(self, link: Link, handle: int) -> None:
        self._hedge_timer = None
        self.hedge = Hedge(link, handle, link.weights, numerics_of(link))

    def settle(self, link: Link) -> Link | None:
        """This link's copy has spoken first: the other one is given up. Returns the other one's link, if there was a copy."""
        hedge, self.hedge = self.hedge, None
        if hedge is None:
            return None
        if hedge.link is not link:
            self._abort(hedge.link, hedge.handle)
            return hedge.link
        loser = self.link
        assert loser is not None
        self._abort(loser, self.handle)
        self._go_on_as(hedge)
        return loser

    def survives(self, link: Link) -> bool:
        """This link's copy is gone. Whether the other one goes on."""
        hedge, self.hedge = self.hedge, None
        if hedge is None:
            return False
        self._leave_ahead_of(hedge.handle if hedge.link is link else self.handle)
        if hedge.link is not link:
            self._go_on_as(hedge)
        return True

    def _go_on_as(self, hedge: Hedge) -> None:
        self.link, self.handle, self.weights, self.numerics = hedge.link, hedge.handle, hedge.weights, hedge.numerics

    def cancel_hedge(self) -> Link | None:
        """Neither a copy nor a timer for one remains. Returns the link of the copy, if there was one."""
        if self._hedge_timer is not None:
            self._hedge_timer.cancel()
            self._hedge_timer = None
        hedge, self.hedge = self.hedge, None
        if hedge is None:
            return None
        self._abort(hedge.link, hedge.handle)
        return hedge.link

    def count_crash(self, survived: bool) -> None:
        """survived: the worker had it for long."""
        self.crashes = 1 if survived else self.crashes + 1

    def refused(self, address: str) -> None:
        self.refused_by.add(address)

    def forget_refusals(self) -> None:
        self.refused_by.clear()

    def take_source(self, link: Link, handle: int) -> worker_pb2.KvSource | None:
        """For one worker, the link's, if it can read it: what is read is read once. handle: of the submit that says so."""
        kept, self._kept, self.prefilled, self._taken = self._kept, None, False, None
        if kept is None:
            return None
        if not reads(link, kept.layout):
            kept.leave()
            return None
        self._taken = handle, kept
        return kept.source

    def _abort(self, link: Link, handle: int) -> None:
        """A worker that has not heard of it cannot leave what it was to read."""
        self._leave_ahead_of(handle)
        if link.abort(handle) and self._taken is not None and self._taken[0] == handle:
            self._taken[1].leave()

    def hand_over(self, kept: Kept | None, ahead: Ahead | None = None) -> None:
        """Its worker has computed the prompt, and said the first token. kept: its pages; None: there is none. ahead: who has
        begun to read them; None: nobody."""
        self._kept, self.prefilled = kept, True
        if ahead is not None:
            self._ahead[0] = ahead

    def read_ahead(self, handle: int, ahead: Ahead) -> None:
        """handle: under which the prompt is computed."""
        self._leave_ahead_of(handle)
        self._ahead[handle] = ahead

    def ahead_of(self, handle: int) -> Ahead | None:
        """Who reads what is computed under this handle, while that is so."""
        ahead = self._ahead.get(handle)
        return ahead if ahead is not None and ahead.stands else None

    def take_ahead(self, handle: int) -> Ahead | None:
        return self._ahead.pop(handle, None)

    @property
    def reader(self) -> Ahead | None:
        """Who has begun to read what has been computed of it, and so is to go on with it."""
        return self.ahead_of(0)

    def handle_at(self, link: Link) -> int | None:
        """It goes there. The handle under which that worker has read its pages ahead; None: it has not."""
        ahead = self.reader
        if ahead is None or ahead.link is not link:
            self._leave_ahead()
            return None
        del self._ahead[0]
        return ahead.handle

    def _leave_ahead(self) -> None:
        for handle in list(self._ahead):
            self._leave_ahead_of(handle)

    def _leave_ahead_of(self, handle: int) -> None:
        if (ahead := self._ahead.pop(handle, None)) is not None:
            ahead.leave()

    @property
    def source_layout(self) -> bytes:
        """Of pages that another worker has for the next one that it goes to; empty: nobody has any."""
        return b"" if self._kept is None else self._kept.layout

    def count_retry(self) -> None:
        self.retried = True

    def worker_ids(self) -> list[str]:
        """Of those that it is on: of two, while it has a copy."""
        links = [self.link, self.hedge.link if self.hedge is not None else None]
        return [link.info.worker_id for link in links if link is not None and link.info is not None]

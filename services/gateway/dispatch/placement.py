"""The placement of one choice: its pool, its worker or its wait, its hedge copy, and its KV pages on other workers.

- If a choice has no output for some time, a second worker may get a hedge copy of it. The first worker that sends output keeps
  the choice, and the submit to the other worker is aborted.
- Pages of the prompt may be on a prefill worker, which reserves them for the decode worker (docs/design/prefill-and-decode.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.dispatch.model_pool import ModelPool, can_read_pages
from rootstock_llm.services.gateway.generation.choice import Choice, EarlierOutput
from rootstock_llm.services.gateway.generation.request import ModelVersion
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.remote.worker_link import WorkerLink
from rootstock_llm.services.shared.index.prefix_index import block_hashes, split_hashes
from rootstock_llm.services.shared.sampling_parameters import DEFAULT_NAMES

Link: TypeAlias = "WorkerLink[Placement]"
Pool: TypeAlias = "ModelPool[Placement]"


@dataclass(frozen=True, slots=True)
class HedgeCopy:
    """The copy of a choice on a second worker. The Placement's own fields describe the original."""

    link: Link
    handle: int  # handle of the copy's submit on that link
    model_version: ModelVersion | None  # model version of the second worker, or None if the worker was never connected
    numerics: str  # numerics_of() the second worker


@dataclass(frozen=True, slots=True)
class KvReservation:
    """KV pages of a computed prompt, which one worker reserves for the next worker of the choice."""

    link: Link  # link to the worker with the pages
    handle: int  # handle of the choice on that link
    source: worker_pb2.KvSource  # address and secret for the worker that reads the pages
    layout: bytes  # page layout; only a worker with an equal layout can read the pages

    def release(self) -> None:
        """Releases the pages at the worker that has them, because no other worker will read them."""
        self.link.release_reservation(self.handle)


@dataclass(frozen=True, slots=True)
class PrefetchedPages:
    """Pages of a prompt that a decode worker reads while a prefill worker still computes the other pages."""

    link: Link  # link to the decode worker
    handle: int  # handle of the prefetch, and of the later submit to the decode worker
    pool: Pool
    predicted_tokens: int  # prompt tokens that the decode worker probably had cached before the prefetch

    @property
    def is_valid(self) -> bool:
        """Whether the decode worker is still connected and reads the pages."""
        return self.link.is_prefetching(self.handle)

    def release(self) -> None:
        """Cancels the prefetch, because the decode worker does not get the choice. Has no effect after the submit to it."""
        self.link.cancel_prefetch(self.handle)
        self.pool.recount(self.link)


@dataclass(slots=True)
class Home:
    """The worker with the KV pages that all items of a score request share. Items go to this worker while it has free slots."""

    link: Link | None = None  # worker of the last placed item, or None before the first one


def numerics_of(link: Link | None) -> str:
    """Returns the fingerprint of a worker's numerics; "" if the results of the worker may differ between two runs.

    Workers with equal fingerprints and equal model versions compute bitwise equal results.
    """
    return "" if link is None or link.info is None else link.info.numerics


def reservation_of(link: Link, finish: worker_pb2.Finish, now: float) -> KvReservation | None:
    """Returns the reservation of a worker that has handed over a choice, or None if the worker reserves no page.

    Also extends `reserved_until` of the link, so that the link stays open while the pages may be reserved.
    """
    info = link.info
    if info is None or not finish.HasField("room"):
        return None
    link.reserved_until = max(link.reserved_until, now + info.kv_hold_ms / 1000)
    return KvReservation(link, finish.handle, _source(link, info, finish.room), info.kv_layout)


def _source(link: Link, info: worker_pb2.WorkerInfo, reserved: worker_pb2.KvRoom) -> worker_pb2.KvSource:
    """Returns the KV source of reserved pages. It has the host of the worker's address from discovery."""
    host = link.address.rpartition(":")[0]
    return worker_pb2.KvSource(address=f"{host}:{info.kv_port}", room=reserved)


class Placement:
    """The worker of one choice, or its wait for a worker. The dispatcher makes the placement, and drops it in release()."""

    __slots__ = (
        "_block_hashes",
        "_first",
        "_hedge_timer",
        "_patience_s",
        "_prefetched",
        "_reservation",
        "_submitted_reservation",
        "batch",
        "charged",
        "choice",
        "crashes",
        "handle",
        "hedge",
        "home",
        "link",
        "model_version",
        "numerics",
        "placed_at",
        "pool",
        "predicted_tokens",
        "prefilled",
        "refused_by",
        "request",
        "retried",
        "wait_timer",
        "waiting_since",
    )

    def __init__(
        self,
        request: RunningRequest,
        choice: Choice,
        pool: Pool,
        first: Placement | None = None,
        refused_by: Collection[str] = (),
        batch: int = 0,
        home: Home | None = None,
    ) -> None:
        """Makes the placement of a choice without a worker.

        Args:
            first: Placement of the prompt's first choice, which computes the block hashes. None if this is the first choice.
            batch: Number that all choices of a request with several prompts share; 0 for a request with one prompt.
            home: Shared by all items of a score request; None for other requests.
        """
        self.request = request
        self.choice = choice
        self.pool = pool
        self.batch = batch
        self.home = home
        self._first = first
        self._block_hashes: Sequence[bytes] | None = None  # None before the first block_hashes()
        self.link: Link | None = None  # link to the worker, or None if the choice is on no worker
        self.handle = 0  # handle of the last submit on the worker's stream
        self.model_version: ModelVersion | None = None  # model version of the output, or None before the first worker
        self.numerics = ""  # numerics_of() the worker that computed the first output
        self.placed_at = 0.0  # loop time of the last submit; 0.0 before the first worker
        self.predicted_tokens = 0  # prompt tokens that the worker probably had cached at the last submit
        self.crashes = 0  # workers lost in a row, each soon after its submit
        self.refused_by = set(refused_by)  # addresses of workers that have refused or failed the choice
        self.retried = False  # the choice has used its only retry after a worker's fault
        self.prefilled = False  # a prefill worker has computed the prompt, and the next worker may read its pages
        # The wait for a worker.
        self.wait_timer: asyncio.TimerHandle | None = None  # time limit of the wait, or None while the choice does not wait
        self.waiting_since = 0.0  # loop time at which the last wait began
        self._patience_s: float | None = (
            None  # seconds that the choice may wait from waiting_since on, or None before the first wait
        )
        self.charged = 0  # weighted prompt and output tokens that have been charged to the API key
        # Copies and pages on other workers.
        self.hedge: HedgeCopy | None = None  # copy of the choice on a second worker
        self._hedge_timer: asyncio.TimerHandle | None = None  # timer after which a copy may be made
        # Prefetches. The dictionary's key is the handle of the submit to the prefill worker while this worker computes the
        # prompt, and 0 after it has finished.
        self._prefetched: dict[int, PrefetchedPages] = {}
        self._reservation: KvReservation | None = None  # reservation that the next submit will name
        self._submitted_reservation: tuple[int, KvReservation] | None = (
            None  # handle of the submit that named a reservation, and this reservation
        )

    def resume(self, earlier: EarlierOutput) -> None:
        """Sets the model version and numerics of earlier output, which another gateway's worker has computed."""
        self.model_version, self.numerics = earlier.version, earlier.numerics

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.choice.prompt.ids

    @property
    def prediction_ids(self) -> Sequence[int]:
        return self.choice.prompt.prediction or ()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.choice.prompt.ids) + len(self.choice.output_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of prompt and output."""
        return [*self.choice.prompt.ids, *self.choice.output_ids]

    @property
    def has_begun(self) -> bool:
        """Whether the choice has output. The output belongs to `model_version`."""
        return bool(self.choice.output_ids)

    @property
    def changes_numerics(self) -> bool:
        """Whether the worker's numerics differ from the numerics of the output so far."""
        return self.has_begun and self.numerics not in ("", numerics_of(self.link))

    @property
    def routing_key(self) -> str:
        return self.choice.params.routing_key

    @property
    def is_scored(self) -> bool:
        return bool(self.choice.params.sampling.HasField("score"))

    @property
    def experts_per_token(self) -> int:
        wanted = self.choice.params.routed_experts
        return 0 if wanted is None else wanted.per_token

    @property
    def in_session(self) -> bool:
        return self.choice.params.session is not None

    def block_hashes(self) -> Sequence[bytes]:
        """Returns the hashes of the prompt's full blocks, which are computed once for all choices of the prompt."""
        if self._first is not None:
            return self._first.block_hashes()
        if self._block_hashes is None:
            prompt = self.choice.prompt
            joined = prompt.block_hashes or block_hashes(self.pool.model.hash_root(self.choice.cache_salt), prompt.ids)
            self._block_hashes = tuple(split_hashes(joined))
        return self._block_hashes

    def write_sampling(self, into: pb.SamplingParams, ends_with_prompt: bool) -> None:
        """Writes the sampling parameters of a submit. They are the same for every worker, except for `ends_with_prompt`.

        Args:
            ends_with_prompt: Whether the worker serves requests that end with their prompt (WorkerInfo). A worker of an older
                version generates one token, which the client does not get.
        """
        choice, params, model = self.choice, self.choice.params, self.request.model
        into.CopyFrom(params.sampling)
        if params.grammar is not None:
            into.grammar.CopyFrom(params.grammar)
        if params.ends_with_prompt:
            into.max_new_tokens = 0 if params.sampling.HasField("score") else 1
        else:
            if params.max_tokens is not None or params.session is None:
                into.max_new_tokens = params.most_tokens(len(choice.prompt.ids), model.context_len)
            for name in DEFAULT_NAMES:
                if not into.HasField(name):
                    setattr(into, name, getattr(model.defaults, name))
            if choice.seed is not None:
                into.seed = choice.seed
        if ends_with_prompt and params.hidden:
            into.max_new_tokens = 0

    def aborted(self, handle: int) -> None:
        if self.choice.trace is not None:
            self.choice.trace.aborted(handle)

    def lost(self, handle: int, was_sent: bool) -> None:
        """Handles the loss of the worker.

        Args:
            was_sent: Whether the submit had been sent. If so, the worker may have read reserved pages, and the reservation is
                released. If not, the next worker gets the reservation.
        """
        if self._submitted_reservation is not None and self._submitted_reservation[0] == handle:
            reservation, self._submitted_reservation = self._submitted_reservation[1], None
            if was_sent:
                reservation.release()
            else:
                self._reservation, self.prefilled = reservation, True
        if self.choice.trace is not None:
            self.choice.trace.lost(handle)

    def place(self, link: Link, handle: int, predicted_tokens: int, now: float) -> None:
        """Sets the worker of the choice. `now` is in loop time."""
        self.link, self.handle = link, handle
        self.placed_at, self.predicted_tokens = now, predicted_tokens
        if self.home is not None:
            self.home.link = link
        if not self.has_begun:
            self.model_version, self.numerics = link.model_version, numerics_of(link)

    def leave(self) -> None:
        """Clears the worker after it has ended the choice or is lost. Cancels the hedge copy and the prefetches."""
        self.link = None
        self.cancel_hedge()
        self._release_prefetched()

    def withdraw(self) -> list[Link]:
        """Aborts the choice on all workers and releases all pages. Returns the links whose workers now have a free slot."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None
        copy, link = self.cancel_hedge(), self.link
        if link is not None:
            self.link = None
            self._abort(link, self.handle)
        readers = [pages.link for pages in self._prefetched.values()]
        self._release_prefetched()
        return [each for each in (copy, link, *readers) if each is not None]

    def count_crash(self, survived: bool) -> None:
        """Counts a lost worker. If the choice had run on this worker for a long time (`survived`), the count restarts at 1."""
        self.crashes = 1 if survived else self.crashes + 1

    def count_retry(self) -> None:
        self.retried = True

    def refused(self, address: str) -> None:
        self.refused_by.add(address)

    def forget_refusals(self) -> None:
        self.refused_by.clear()

    def worker_ids(self) -> list[str]:
        """Returns the ids of the choice's worker and of the hedge copy's worker."""
        links = [self.link, self.hedge.link if self.hedge is not None else None]
        return [link.info.worker_id for link in links if link is not None and link.info is not None]

    # The wait for a worker

    def begin_wait(self, patience_s: float, afresh: bool, expired: Callable[[], None]) -> None:
        """Starts the timer of a wait.

        Args:
            patience_s: Longest time in seconds for all waits of the choice together. Time on workers does not count.
            afresh: True: this wait has the whole `patience_s`. False: the times of earlier waits are subtracted.
            expired: Called on the event loop if the choice still waits when its patience ends.
        """
        loop = asyncio.get_running_loop()
        self.waiting_since = loop.time()
        if self._patience_s is None or afresh:
            self._patience_s = patience_s
        self.wait_timer = loop.call_at(self.waiting_since + max(0.0, self._patience_s), expired)

    def prolong_wait(self, patience_s: float, expired: Callable[[], None]) -> None:
        """Restarts the timer, which then ends after `patience_s`."""
        loop = asyncio.get_running_loop()
        self._patience_s = loop.time() - self.waiting_since + patience_s
        self.wait_timer = loop.call_at(self.waiting_since + self._patience_s, expired)

    def end_wait(self) -> float | None:
        """Stops the timer. Returns the seconds of the wait, or None if the choice did not wait."""
        if self.wait_timer is None:
            return None
        self.wait_timer.cancel()
        self.wait_timer = None
        waited_s = asyncio.get_running_loop().time() - self.waiting_since
        assert self._patience_s is not None, "begin_wait() sets the patience"
        self._patience_s -= waited_s
        return waited_s

    def charge(self, spent: int) -> int:
        """Returns the tokens that have not been charged yet, and counts them as charged.

        Args:
            spent: Prompt tokens of the choice, plus OUTPUT_WEIGHT times its output tokens so far.
        """
        due = max(0, spent - self.charged)
        self.charged += due
        return due

    # The hedge copy

    def hedge_after(self, seconds: float, make: Callable[[], None]) -> None:
        self._hedge_timer = asyncio.get_running_loop().call_later(seconds, make)

    def copy_to(self, link: Link, handle: int) -> None:
        self._hedge_timer = None
        self.hedge = HedgeCopy(link, handle, link.model_version, numerics_of(link))

    def settle(self, link: Link) -> Link | None:
        """Keeps the submit to `link`, whose worker has sent output first, and aborts the other submit.

        Returns:
            The link of the aborted submit. None if the choice has no hedge copy.
        """
        hedge, self.hedge = self.hedge, None
        if hedge is None:
            return None
        if hedge.link is not link:
            self._abort(hedge.link, hedge.handle)
            return hedge.link
        loser = self.link
        assert loser is not None
        self._abort(loser, self.handle)
        self._continue_as(hedge)
        return loser

    def continues_without(self, link: Link) -> bool:
        """Drops the submit to `link`, whose worker has ended the submit or is lost. Returns whether another submit remains."""
        hedge, self.hedge = self.hedge, None
        if hedge is None:
            return False
        self._release_prefetched_of(hedge.handle if hedge.link is link else self.handle)
        if hedge.link is not link:
            self._continue_as(hedge)
        return True

    def cancel_hedge(self) -> Link | None:
        """Aborts the hedge copy, and stops the timer of a future copy. Returns the copy's link; None without a copy."""
        if self._hedge_timer is not None:
            self._hedge_timer.cancel()
            self._hedge_timer = None
        hedge, self.hedge = self.hedge, None
        if hedge is None:
            return None
        self._abort(hedge.link, hedge.handle)
        return hedge.link

    def _continue_as(self, hedge: HedgeCopy) -> None:
        self.link, self.handle = hedge.link, hedge.handle
        self.model_version, self.numerics = hedge.model_version, hedge.numerics

    def _abort(self, link: Link, handle: int) -> None:
        """Aborts one submit. If the submit was never sent, also releases the reservation that it names."""
        self._release_prefetched_of(handle)
        if link.abort(handle) and self._submitted_reservation is not None and self._submitted_reservation[0] == handle:
            self._submitted_reservation[1].release()

    # Pages on other workers

    def hand_over(self, reservation: KvReservation | None, prefetched: PrefetchedPages | None = None) -> None:
        """Stores the location of the prompt's KV after a prefill worker has computed the prompt and the first token.

        Args:
            reservation: The pages at the prefill worker. None if it reserves no page.
            prefetched: Pages that a decode worker has read during the computation; None if there are none.
        """
        self._reservation, self.prefilled = reservation, True
        if prefetched is not None:
            self._prefetched[0] = prefetched

    @property
    def source_layout(self) -> bytes:
        """Layout of the reserved pages; b"" without a reservation."""
        return b"" if self._reservation is None else self._reservation.layout

    def take_source(self, link: Link, handle: int) -> worker_pb2.KvSource | None:
        """Removes the reservation and returns its KV source, for the submit with this handle. Reserved pages are read once.

        Returns:
            None without a reservation, or if the worker of `link` cannot read pages of the reservation's layout. The reservation
            is then released.
        """
        reservation, self._reservation, self.prefilled, self._submitted_reservation = self._reservation, None, False, None
        if reservation is None:
            return None
        if not can_read_pages(link, reservation.layout):
            reservation.release()
            return None
        self._submitted_reservation = handle, reservation
        return reservation.source

    def prefetch(
        self, handle: int, prefill: Link, decode: Link, decode_handle: int, reserved: worker_pb2.KvRoom, predicted_tokens: int
    ) -> None:
        """Lets a decode worker read the pages that the prefill worker has computed so far.

        Args:
            handle: Handle of the choice at the prefill worker.
            decode_handle: Handle of the prefetch, and of the later submit to the decode worker.
            reserved: The reservation of these pages.
            predicted_tokens: Prompt tokens that the decode worker probably has cached.
        """
        info, version, choice = prefill.info, decode.model_version, self.choice
        assert info is not None, "a worker that has sent a message is connected"
        message = worker_pb2.Prefetch(
            handle=decode_handle,
            cache_salt=choice.cache_salt,
            revision="" if version is None else version.revision,
            source=_source(prefill, info, reserved),
            priority=choice.priority,
        )
        decode.prefetch(self, message)
        self._release_prefetched_of(handle)
        self._prefetched[handle] = PrefetchedPages(decode, decode_handle, self.pool, predicted_tokens)

    def prefetched_of(self, handle: int) -> PrefetchedPages | None:
        """Returns the valid prefetch of the prompt that is computed with this handle, or None."""
        pages = self._prefetched.get(handle)
        return pages if pages is not None and pages.is_valid else None

    def take_prefetched(self, handle: int) -> PrefetchedPages | None:
        return self._prefetched.pop(handle, None)

    @property
    def reader(self) -> PrefetchedPages | None:
        """The prefetch of the completely computed prompt. Its decode worker should continue the choice. None without one."""
        return self.prefetched_of(0)

    def handle_at(self, link: Link) -> int | None:
        """Removes the prefetch at this link's worker, and returns the prefetch's handle for the submit.

        Returns:
            None if this worker has no valid prefetch of the computed prompt. All prefetches of the choice are then released.
        """
        pages = self.reader
        if pages is None or pages.link is not link:
            self._release_prefetched()
            return None
        del self._prefetched[0]
        return pages.handle

    def _release_prefetched(self) -> None:
        for handle in list(self._prefetched):
            self._release_prefetched_of(handle)

    def _release_prefetched_of(self, handle: int) -> None:
        if (pages := self._prefetched.pop(handle, None)) is not None:
            pages.release()

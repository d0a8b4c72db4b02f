"""Tests whether a worker can compute a token.

The test passes if a worker has completed a step within RECENT_S, or if a usable worker is busy and does not hang. Otherwise, an
idle worker gets a request for one token. So the probe never waits for other requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.dispatch.dispatcher import Dispatcher
from rootstock_llm.services.gateway.dispatch.placement import Link, Pool
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.choice import Delta
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import (
    GenerationParams,
    GenerationRequest,
    ModelInfo,
    PromptInput,
    one_step,
)
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.service.sink import GenerationCall, RunGeneration, Sink
from rootstock_llm.services.shared.limits import PRIORITY_RANGE

RECENT_S = 2.0  # largest age of the last step, in seconds, that proves that a worker computes tokens
TRY_S = 10.0  # time limit of the trial request in seconds
_PROMPT_ID = 0  # token id that every vocabulary has


class _ProbeSink(Sink):
    """Records the error of a trial request."""

    def __init__(self) -> None:
        self.failure = ""

    def open(self, running: RunningRequest) -> None:
        """Does nothing."""

    async def begin(self, prepared: GenerationRequest, texts: TokenTexts) -> bool:
        return True

    async def queued(self) -> None:
        """Ignores the queue."""

    async def take(self, deltas: Sequence[Delta], more: bool) -> None:
        """Ignores the token."""

    async def end(self) -> None:
        """Does nothing, because `failure` stays empty."""

    async def fail(self, error: ApiError) -> None:
        self.failure = error.message

    def released(self, running: RunningRequest) -> None:
        """Does nothing."""


class GenerationProbe:
    """Runs trial requests, one at a time. Concurrent callers of failure() share one trial request. Each process has one probe."""

    def __init__(self, dispatcher: Dispatcher, run: RunGeneration) -> None:
        """Makes the probe. `run` is GenerationService.run."""
        self._dispatcher = dispatcher
        self._run = run
        self._numbers = itertools.count(1)
        self._trial: asyncio.Task[str] | None = None

    async def failure(self) -> str:
        """Returns "" if a worker can compute a token, else the reason."""
        fleet = self._dispatcher.fleet
        connected = [link for link in fleet.links.values() if fleet.pool_of(link) is not None]
        if not connected:
            return "No worker is connected."
        last = self._dispatcher.last_step_at
        if last is not None and asyncio.get_running_loop().time() - last < RECENT_S:
            return ""
        fit = [link for pool in fleet.pools.values() for link in pool.usable() if not link.hangs]
        if any(link.load is not None and link.load.num_open for link in fit):
            return ""
        if not fit:
            return "No worker can compute a token: " + ", ".join(_fault_of(link) for link in connected) + "."
        if self._trial is None or self._trial.done():
            self._trial = asyncio.create_task(self._try(fit))
        return await asyncio.shield(self._trial)

    async def _try(self, idle: Sequence[Link]) -> str:
        pool, sink = self._pool_of(idle), _ProbeSink()
        request = GenerationRequest.of(pool.model, [PromptInput([_PROMPT_ID], None)], _one_token(pool.model))

        async def prepared(_body: RequestBody, _origin: Origin) -> GenerationRequest:
            return request

        origin = Origin(f"health-{next(self._numbers)}", "/health_generate", is_counted=False)
        avoid = {link.address for link in pool.links.values() if link not in idle}
        call = GenerationCall(origin, prepared, avoid=avoid)
        try:
            async with asyncio.timeout(TRY_S):
                await self._run(call, sink)
        except TimeoutError:
            return f"No token arrived within {TRY_S:g} s."
        return sink.failure

    def _pool_of(self, idle: Sequence[Link]) -> Pool:
        """Returns the default model's pool if it has an idle worker, else the pool of the first idle worker."""
        pools = [pool for link in idle if (pool := self._dispatcher.fleet.pool_of(link)) is not None]
        default = self._dispatcher.catalog.default
        return next((pool for pool in pools if pool.model == default), pools[0])


def _fault_of(link: Link) -> str:
    name = link.info.worker_id if link.info is not None else link.address
    if link.paused:
        return f"{name} is paused"
    if link.hangs and link.load is not None:
        age_s, limit_s = link.load.step_age_ms / 1e3, link.load.step_limit_ms / 1e3
        return f"{name} hangs: its step has taken {age_s:.1f} s; the limit is {limit_s:.1f} s"
    return f"{name} takes no requests"


def _one_token(model: ModelInfo) -> GenerationParams:
    embedding = None if model.generates else pb.Embedding()
    return one_step(pb.SamplingParams(temperature=0.0, embedding=embedding), PRIORITY_RANGE[1])

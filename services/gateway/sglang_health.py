"""Whether an answer can be made: seen from the steps that workers send, or else tried with one token."""

from __future__ import annotations

import asyncio
import itertools

from rootstock.v1 import common_pb2 as pb
from services.gateway.dispatch import Dispatcher
from services.gateway.errors import ApiError
from services.gateway.generation import Generation, ModelInfo, Part, Prompt
from services.gateway.metrics import GatewayMetrics
from services.gateway.request_state import ClientRequest
from services.shared.limits import PRIORITY_RANGE

RECENT_S = 2.0  # a step this young is proof enough, and asks nothing of a busy worker
TRY_S = 10.0
_PROMPT_ID = 0  # a token that every vocabulary has


class GenerationProbe:
    """One per process. However many ask at once, one request goes to a worker."""

    def __init__(self, dispatcher: Dispatcher, metrics: GatewayMetrics) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._trial: asyncio.Task[str] | None = None

    async def failure(self) -> str:
        """Why no answer can be made; "" if one can."""
        model, last = self._dispatcher.catalog.default, self._dispatcher.last_step_at
        if model is None or not self._dispatcher.connected():
            return "No worker is connected."
        if last is not None and asyncio.get_running_loop().time() - last < RECENT_S:
            return ""
        if self._trial is None or self._trial.done():
            self._trial = asyncio.create_task(self._try(model))
        return await asyncio.shield(self._trial)

    async def _try(self, model: ModelInfo) -> str:
        request = ClientRequest(f"health-{next(self._numbers)}", self._dispatcher, self._metrics)
        try:
            async with asyncio.timeout(TRY_S):
                request.begin([Part(Prompt([_PROMPT_ID], None), _one_token(model))], model)
                self._dispatcher.start(request)
                await request.news()
        except ApiError as error:
            return error.message
        except TimeoutError:
            return f"No token has come within {TRY_S:g} s."
        finally:
            request.close()
        return ""


def _one_token(model: ModelInfo) -> Generation:
    embedding = None if model.generates else pb.Embedding()
    return Generation(
        stream=False,
        include_usage=False,
        n=1,
        seed=None,
        max_tokens=1,
        sampling=pb.SamplingParams(temperature=0.0, embedding=embedding),
        stop_token_ids=frozenset(),
        skip_special_tokens=True,
        include_stop=False,
        return_token_ids=False,
        cache_salt="",
        priority=PRIORITY_RANGE[1],
    )

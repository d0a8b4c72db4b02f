"""Conversion of a Submit message to a Request: refusals of requests that can never run, and the worker's defaults."""

from __future__ import annotations

from dataclasses import replace

from services.shared.index.block_hash import cache_namespace
from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.messages import ErrorCode, Prefetch, Submit
from services.worker.core.contracts.plan import no_tokens
from services.worker.core.contracts.sampling import FORCE_STREAM_INTERVAL
from services.worker.core.contracts.tree_name import tree_name
from services.worker.core.kv.other_tiers import Wanted
from services.worker.core.requests.finish import FinishDecision, refused, tail_tokens
from services.worker.core.requests.request import Request, RequestKv, RequestProgress

_UNLIMITED = 1 << 62


def refusal(message: Submit, config: SchedulerConfig, offers_grammars: bool) -> FinishDecision | None:
    """Returns the ending of a request that can never run on this worker, or None."""
    length, given = len(message.prompt_ids), len(message.output_ids)
    outputs = message.params.max_new_tokens if message.params.samples else 0
    if length < 1:
        return refused("the prompt is empty")
    if length + min(outputs, 1) > config.context_len:
        return refused(f"the prompt has {length} tokens; the context holds {config.context_len}")
    if length + outputs > config.context_len:
        return refused("prompt and max_new_tokens together exceed the context")
    if length + given > config.context_len:
        return refused("prompt and output together exceed the context", "output_ids")
    alone = message.session is not None or message.params.embedding is not None or message.params.score is not None
    if given and alone:
        return refused("neither in a session nor for an embedding or a score", "output_ids")
    if message.hand_over and alone:
        return refused("neither in a session nor for an embedding or a score", "hand_over")
    if -(-(length + given) // config.page_size) > config.num_pages:
        size = config.num_pages * config.page_size
        return refused(f"the prompt has {length + given} tokens; the KV pool holds {size}", error=ErrorCode.OUT_OF_MEMORY)
    if message.params.grammar is not None and not offers_grammars:
        return refused("this worker offers no structured output", "grammar")
    return None


def make_request(message: Submit, seq: int, config: SchedulerConfig, now: float, revision: str = "") -> Request:
    """Creates a request from a message that refusal() accepts.

    A request with given output is like a retracted one: its output and the logprobs of its prompt count as sent.

    Args:
        message: the message.
        seq: number of the request.
        config: the configuration.
        now: time of arrival.
        revision: revision of the weights that compute the request.
    """
    params, given = message.params, len(message.output_ids)
    if given and params.prompt_logprobs_from >= 0:
        params = replace(params, prompt_logprobs_from=-1)
    eos = () if params.ignore_eos else config.eos_token_ids
    reusable = params.embedding is None or config.pooling_reuses_prefix
    first_logprob = max(params.prompt_logprobs_from, 1)
    progress = RequestProgress(
        output_ids=list(message.output_ids),
        num_given=given,
        num_sent=given,
        logprob_planned=first_logprob,
        logprob_done=first_logprob,
    )
    source = message.source if config.reads_peers else None
    request = Request(
        seq=seq,
        peer=message.peer,
        handle=message.handle,
        request_id=message.request_id,
        prompt_ids=message.prompt_ids,
        params=params,
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
        namespace=_namespace(message, revision),
        rank=config.rank(message.priority),
        interval=params.stream_interval if message.stream else FORCE_STREAM_INTERVAL,
        arrival=now,
        deadline=now + message.timeout_s if message.timeout_s else float("inf"),
        tail_tokens=tail_tokens(params.stop),
        reuse_limit=_UNLIMITED if reusable else 0,
        routing_key=message.routing_key,
        session=message.session,
        payer=(message.tenant, message.peer, message.batch) if message.batch else (message.tenant, 0, 0),
        weight=message.weight,
        prediction=message.prediction if params.speculative else no_tokens(),
        progress=progress,
        kv=RequestKv(source=source, reservation=message.hand_over),
    )
    if message.page_keys is not None and message.page_keys.tree == request.namespace and message.session is None:
        request.kv.page_keys = list(message.page_keys.keys)
    request.rekey()
    return request


def wanted_ahead(message: Prefetch, seq: int, config: SchedulerConfig, revision: str) -> Wanted:
    """Creates the page search of a prefetch. A prompt that is too long for a request wants no pages."""
    namespace = _namespace(message, revision)
    fits = len(message.prompt_ids) < config.context_len
    tokens = message.prompt_ids.tobytes() if fits else b""
    wanted = Wanted(seq, namespace, tokens, 0, config.rank(message.priority), source=message.source, ahead=True)
    if message.page_keys is not None and message.page_keys.tree == namespace:
        wanted.keys = list(message.page_keys.keys)
    return wanted


def _namespace(message: Submit | Prefetch, revision: str) -> str:
    return tree_name(revision, cache_namespace(message.lora, message.salt))

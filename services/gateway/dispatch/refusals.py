"""The errors that clients get for requests that no worker serves, or that a worker has refused or failed."""

from __future__ import annotations

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.generation.choice import Choice
from rootstock_llm.services.gateway.generation.errors import (
    MAX_DETAIL_CHARS,
    ApiError,
    bad_request,
    internal,
    timed_out,
    unavailable,
)
from rootstock_llm.services.gateway.generation.request import GenerationParams
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.shared.field_refusal import why_of

SESSION_ID = "session.session_id"  # `field` of a worker's refusal of an unknown session
GRAMMAR = pb.SamplingParams.DESCRIPTOR.fields_by_name["grammar"].name


class Refusals:
    """Makes the errors of requests that no worker serves. Each method counts one refusal and returns a 503."""

    def __init__(self, retry_after_s: int, metrics: GatewayMetrics) -> None:
        self._retry_after_s = retry_after_s
        self._counter = metrics.refusals

    def full(self) -> ApiError:
        return self._refused("Too many requests wait for a worker.", "queue_full")

    def refusing(self) -> ApiError:
        return self._refused(
            "Every worker of this model refuses new requests: an operator has set 'max_queued_requests' to 0. Retry later.",
            "queue_full",
        )

    def busy(self) -> ApiError:
        return self._refused("All workers are busy.", "queue_timeout")

    def no_worker(self) -> ApiError:
        return self._refused("No worker is connected.", "no_worker")

    def no_scores(self) -> ApiError:
        return self._refused("All workers of this model have an older version that serves no scores. Retry later.", "no_worker")

    def weights_gone(self) -> ApiError:
        return self._refused(
            "No worker serves the model version that began the response. Send the request again.", "weights_not_served"
        )

    def paused(self) -> ApiError:
        return self._refused("All workers that could serve this request are paused.", "paused")

    def _refused(self, message: str, reason: str) -> ApiError:
        self._counter.labels(reason).inc()
        return unavailable(message, self._retry_after_s, reason)


def error_of_finish(finish: worker_pb2.Finish, choice: Choice, retry_after_s: int) -> ApiError:
    """Returns the error for a request that a worker has refused or failed, with the field names of the client's API.

    Args:
        finish: Last message of the worker, with the reason ABORT or UNSPECIFIED.
    """
    code, text, asked = finish.error, _why(finish), choice.params
    if code == pb.ERROR_CODE_INVALID_ARGUMENT and finish.field == SESSION_ID:
        return ApiError(
            404, text or "No session has this id, or it has ended.", param=asked.fields.of(SESSION_ID), code="session_not_found"
        )
    if code == pb.ERROR_CODE_INVALID_ARGUMENT:
        return _refused(finish, text, asked)
    if code == pb.ERROR_CODE_OUT_OF_MEMORY:
        return bad_request(None, text or "The request does not fit the KV pool.", "out_of_memory")
    if code == pb.ERROR_CODE_QUEUE_FULL:
        return unavailable("The queue is full.", retry_after_s, "queue_full")
    if code == pb.ERROR_CODE_TIMEOUT:
        return timed_out(text or "The request took longer than the worker allows.")
    if code == pb.ERROR_CODE_UNAVAILABLE:
        return unavailable("The worker is stopping and accepts no requests.", retry_after_s)
    if code == pb.ERROR_CODE_OTHER_WEIGHTS:
        return unavailable("The worker has loaded another model version.", retry_after_s)
    if code == pb.ERROR_CODE_CANCELLED:
        return unavailable("The request was cancelled on the worker.", retry_after_s, "cancelled")
    return internal(text or "The worker failed to compute this request.")


def _why(finish: worker_pb2.Finish) -> str:
    element = finish.element if finish.HasField("element") else None
    return why_of(finish.message, finish.field, element)[:MAX_DETAIL_CHARS]


def _refused(finish: worker_pb2.Finish, text: str, asked: GenerationParams) -> ApiError:
    """Returns the error of a refused field. A worker of an older version names no field."""
    if not finish.field:
        return bad_request(None, text or "The worker refused the request.")
    if finish.field == GRAMMAR and asked.grammar_field is not None:
        return _of_grammar(asked.grammar_field, text, finish.element if finish.HasField("element") else None, asked)
    own = asked.fields.of(finish.field)
    element = f"[{finish.element}]" if finish.HasField("element") else ""
    return bad_request(own, f"{own}{element}: {text or 'The worker refused it.'}")


def _of_grammar(field: str, text: str, part: int | None, asked: GenerationParams) -> ApiError:
    """Returns the error of a refused grammar.

    The error names a field of the request, because the client has not seen the grammar itself. If the gateway made the grammar
    from several fields, the error names the field of the refused part. If the part is unknown, it names `field`.
    """
    if part is not None and part < len(asked.grammar_fields):
        return bad_request(asked.grammar_fields[part], f"{asked.grammar_fields[part]}: {text}")
    return bad_request(field, f"{field}: {text}" if asked.grammar_fields else text)

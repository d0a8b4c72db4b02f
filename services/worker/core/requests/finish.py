"""When a request ends: decided here and nowhere else. The first of these that holds is the reason:

abort (not here: an aborted request has left before its next token is looked at) · a fault of the row, or a token outside the
vocabulary · a token that the grammar refuses · length · grammar complete · stop token ids and EOS · stop string · stop regex ·
the hand-over to another worker.
That is SGLang's check_finished but for its vocabulary boundary, which comes before length here: what is no token is no output
(docs/design/scheduler.md#finish-order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.grammar import Reason
from services.worker.core.contracts.messages import ErrorCode, FinishReason
from services.worker.core.contracts.plan import RowFault
from services.worker.core.requests.request import Request

CHARS_PER_TOKEN = 2  # of most text, at least
REGEX_TAIL_TOKENS = 256  # a stop pattern is sought in so many last tokens,
REGEX_TAIL_CHARS = 1024  # and at most so many characters


class StopRuleTooExpensive(Exception):
    """A stop rule cannot be held to any longer; the message is for the client."""


class TextRules(Protocol):
    """What the stop rules need to know of text. Pure."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of the last output ids of a request; may have U+FFFD at its edges."""
        ...

    def search(self, pattern: str, text: str) -> bool:
        """Whether the pattern, which was checked when its request came in, matches anywhere. Raises StopRuleTooExpensive."""
        ...


@dataclass(frozen=True, slots=True)
class FinishDecision:
    """As in Finish."""

    reason: FinishReason
    matched_stop: str = ""
    matched_token: int = -1
    error: ErrorCode = ErrorCode.NONE
    message: str = ""
    embedding: NDArray[np.float32] | None = None
    label_logprobs: NDArray[np.float32] | None = None
    field: str = ""
    element: int | None = None


CANCELLED = FinishDecision(FinishReason.ABORT, error=ErrorCode.CANCELLED, message="the request was aborted")
_HANDED_OVER = FinishDecision(FinishReason.HANDED_OVER)


def refused(message: str, field: str = "", error: ErrorCode = ErrorCode.INVALID_ARGUMENT) -> FinishDecision:
    element = message.part if isinstance(message, Reason) and field else None
    return FinishDecision(FinishReason.ABORT, error=error, message=message, field=field, element=element)


def check_fault(token: int, vocab_size: int, fault: RowFault | None) -> FinishDecision | None:
    """The vocabulary boundary: a result that is no token ends its request with an error and adds nothing to its output."""
    if fault is RowFault.NAN_LOGITS:
        return FinishDecision(
            FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the model's logits for this request were not finite"
        )
    if fault is RowFault.FAILED:
        message = "sampling this request's next token failed"
        return FinishDecision(FinishReason.ABORT, error=ErrorCode.INTERNAL, message=message)
    if fault is RowFault.OUT_OF_MEMORY:
        message = "the accelerator ran out of memory while it computed this request"
        return FinishDecision(FinishReason.ABORT, error=ErrorCode.INTERNAL, message=message)
    if fault is RowFault.NO_TOKEN_ALLOWED:
        message = "the request's allowed and banned tokens, grammar and stop rules together leave no token to sample"
        return refused(message)
    if fault is RowFault.OUT_OF_VOCAB or not 0 <= token < vocab_size:
        return FinishDecision(
            FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the sampled token lies outside the vocabulary"
        )
    return None


def check_finished(request: Request, rules: TextRules, grammar_done: bool = False) -> FinishDecision | None:
    """Looks at the newest of request.output_ids. None: it goes on."""
    ending = _answer_ends(request, rules, grammar_done)
    if ending is None and request.kv.reservation is not None and len(request.progress.output_ids) > request.progress.num_given:
        return _HANDED_OVER
    return ending


def _answer_ends(request: Request, rules: TextRules, grammar_done: bool) -> FinishDecision | None:
    params = request.params
    count = len(request.progress.output_ids)
    assert 0 < count <= max(params.max_new_tokens, request.progress.num_given), "an output is looked at after each token"
    if count >= params.max_new_tokens:
        return FinishDecision(FinishReason.LENGTH)
    token = request.progress.output_ids[-1]
    is_stop = token in request.stop_token_ids
    if grammar_done:
        return FinishDecision(FinishReason.MATCHED_TOKEN, matched_token=token if is_stop else -1)
    if count >= params.min_new_tokens and is_stop:
        return FinishDecision(FinishReason.MATCHED_TOKEN, matched_token=token)
    return _check_text(request, rules) if params.stop or params.stop_regex else None


def _check_text(request: Request, rules: TextRules) -> FinishDecision | None:
    """One request's undecodable output is that request's error; the others of its step go on."""
    params = request.params
    try:
        matched = first_stop(_tail_text(request, rules), params.stop) if params.stop else None
        if matched is not None:
            return FinishDecision(FinishReason.MATCHED_STRING, matched_stop=matched)
        if not params.stop_regex:
            return None
        text = rules.decode(request.progress.output_ids[-REGEX_TAIL_TOKENS:], params.skip_special_tokens)[-REGEX_TAIL_CHARS:]
        pattern = next((pattern for pattern in params.stop_regex if rules.search(pattern, text)), None)
    except StopRuleTooExpensive as error:
        return refused(str(error))
    except Exception as error:
        message = f"the output could not be searched for stop strings: {type(error).__name__}"
        return FinishDecision(FinishReason.ABORT, error=ErrorCode.INTERNAL, message=message)
    return None if pattern is None else FinishDecision(FinishReason.MATCHED_REGEX, matched_stop=pattern)


def _tail_text(request: Request, rules: TextRules) -> str:
    """Enough of the output's end to hold any stop string that the newest token completes. Tokens give few characters or many,
    special ones none, so a first guess is made longer until it suffices."""
    ids, count, skip = request.progress.output_ids, request.tail_tokens, request.params.skip_special_tokens
    enough = max(map(len, request.params.stop)) + len(rules.decode(ids[-1:], skip)) + 4  # a cut character
    text = rules.decode(ids[-count:], skip)
    while len(text) < enough and count < len(ids):
        count *= 2
        text = rules.decode(ids[-count:], skip)
    return text


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Returns the stop string that begins first in `text`, or None. Of several that begin together, returns the first listed.

    This is SGLang's rule for the reason that a response reports. The detokenizer's StopStringBuffer searches again by another
    rule: it cuts streamed text at the stop string that ends first, because it must not wait for longer ones.
    """
    best: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop)
        if at >= 0 and (best is None or at < best[0]):
            best = (at, stop)
    return best[1] if best else None


def tail_tokens(stops: Sequence[str]) -> int:
    """How many last tokens are likely to hold any of the stop strings: a first guess."""
    return max((len(stop) for stop in stops), default=0) // CHARS_PER_TOKEN + 4

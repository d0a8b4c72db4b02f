"""Decides whether a request ends, and for which reason.

A request that can never run is refused at arrival. Otherwise, the first of these conditions that holds after a token is the
reason:

1. The row has a fault, or its token is outside of the vocabulary.
2. The grammar does not allow the token.
3. The output has max_new_tokens tokens.
4. The grammar is complete.
5. The token is a stop token or EOS, and the output has at least min_new_tokens tokens.
6. The output contains a stop string.
7. The output matches a stop regex.
8. The request is to be handed over to another worker, and this worker has sampled a token.

Aborts come from code outside of this module. The order is that of SGLang's check_finished with one exception: SGLang examines the
vocabulary after the length. Here, a token outside of the vocabulary is never output (docs/design/scheduler.md#finish-order).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.grammar import Reason
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, Finish, FinishReason, Submit
from rootstock_llm.services.worker.core.contracts.plan import RowFault
from rootstock_llm.services.worker.core.requests.request import Request

# Stop patterns are searched in the last REGEX_TAIL_CHARS characters of the last REGEX_TAIL_TOKENS output tokens.
REGEX_TAIL_TOKENS = 256
REGEX_TAIL_CHARS = 1024


class StopRuleTooExpensive(Exception):
    """The search of a stop pattern exceeds its time limit. The request ends with this exception's message as its error."""


class TextRules(Protocol):
    """Text functions without side effects, for stop strings and stop patterns."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of a request's last output ids. A character that is cut at either end becomes U+FFFD."""
        ...

    def search(self, pattern: str, text: str) -> bool:
        """Returns whether the pattern, which was checked at submission, matches anywhere in the text.

        Raises:
            StopRuleTooExpensive: the search exceeds its time limit.
        """
        ...


CANCELLED = Finish(FinishReason.ABORT, error=ErrorCode.CANCELLED, message="the request was aborted")
_HANDED_OVER = Finish(FinishReason.HANDED_OVER)


def refused(message: str, field: str = "", error: ErrorCode = ErrorCode.INVALID_ARGUMENT) -> Finish:
    """Returns an ending with an error. It names the field's invalid element if `message` is a Reason and `field` is set."""
    element = message.part if isinstance(message, Reason) and field else None
    return Finish(FinishReason.ABORT, error=error, message=message, field=field, element=element)


def refusal(message: Submit, config: SchedulerConfig, offers_grammars: bool) -> Finish | None:
    """Returns the ending of a request that can never run on this worker, or None."""
    length, given = len(message.prompt_ids), len(message.output_ids)
    outputs = message.params.max_new_tokens if message.params.samples else 0
    if length < 1:
        return refused("the prompt is empty")
    if length + min(outputs, 1) > config.context_len:
        least = " and must hold an output token" if outputs else ""
        return refused(f"the prompt has {length} tokens; the model's context is {config.context_len} tokens{least}")
    if length + outputs > config.context_len:
        return refused(
            f"prompt and max_new_tokens have {length + outputs} tokens; the model's context is {config.context_len} tokens"
        )
    if length + given > config.context_len:
        text = f"prompt and output_ids have {length + given} tokens; the model's context is {config.context_len} tokens"
        return refused(text, "output_ids")
    alone = message.session is not None or message.params.embedding is not None or message.params.score is not None
    if given and alone:
        return refused("must be empty for a request in a session, an embedding or a score", "output_ids")
    if message.hand_over and alone:
        return refused("must be unset for a request in a session, an embedding or a score", "hand_over")
    if message.routed_from >= 0 and (alone or message.hand_over):
        return refused("must be unset for a request in a session, an embedding, a score or a handover", "routed_experts_from")
    if message.routed_from > length + given:
        return refused(f"{message.routed_from} exceeds the {length + given} tokens of the request", "routed_experts_from")
    if -(-(length + given) // config.page_size) > config.num_pages:
        size = config.num_pages * config.page_size
        return refused(
            f"the prompt (with output_ids) has {length + given} tokens; the KV pool has {size} tokens",
            error=ErrorCode.OUT_OF_MEMORY,
        )
    if message.params.grammar is not None and not offers_grammars:
        return refused("this worker offers no structured output", "grammar")
    return None


def check_fault(token: int, vocab_size: int, fault: RowFault | None) -> Finish | None:
    """Returns the ending for a row fault or a token outside of the vocabulary, or None if the row has neither."""
    if fault is RowFault.NAN_LOGITS:
        return Finish(FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the model's logits for this request were not finite")
    if fault is RowFault.FAILED:
        message = "sampling this request's next token failed"
        return Finish(FinishReason.ABORT, error=ErrorCode.INTERNAL, message=message)
    if fault is RowFault.OUT_OF_MEMORY:
        message = "the accelerator ran out of memory while it computed this request"
        return Finish(FinishReason.ABORT, error=ErrorCode.INTERNAL, message=message)
    if fault is RowFault.NO_TOKEN_ALLOWED:
        message = "the request's allowed and banned tokens, grammar and stop rules together leave no token to sample"
        return refused(message)
    if fault is RowFault.OUT_OF_VOCAB or not 0 <= token < vocab_size:
        return Finish(FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the sampled token lies outside the vocabulary")
    return None


def check_finished(request: Request, rules: TextRules, grammar_done: bool = False) -> Finish | None:
    """Returns the ending after the newest output token, or None if the request continues."""
    ending = _answer_ends(request, rules, grammar_done)
    if ending is None and request.kv.reservation is not None and len(request.progress.output_ids) > request.progress.num_given:
        return _HANDED_OVER
    return ending


def _answer_ends(request: Request, rules: TextRules, grammar_done: bool) -> Finish | None:
    """Returns the ending by conditions 3 to 7 of the module's list, or None if none of them holds."""
    params = request.params
    count = len(request.progress.output_ids)
    assert 0 < count <= max(params.max_new_tokens, request.progress.num_given), "the length is checked after each token"
    if count >= params.max_new_tokens:
        return Finish(FinishReason.LENGTH)
    token = request.progress.output_ids[-1]
    is_stop = token in request.stop_token_ids
    if grammar_done:
        return Finish(FinishReason.MATCHED_TOKEN, matched_token=token if is_stop else -1)
    if count >= params.min_new_tokens and is_stop:
        return Finish(FinishReason.MATCHED_TOKEN, matched_token=token)
    return _check_text(request, rules) if params.stop or params.stop_regex else None


def _check_text(request: Request, rules: TextRules) -> Finish | None:
    """Returns the ending if the output contains a stop string or matches a stop pattern, or None.

    If the search raises an exception, this request ends with an error. The other requests of the step continue.
    """
    params = request.params
    try:
        matched = first_stop(_tail_text(request, rules), params.stop) if params.stop else None
        if matched is not None:
            return Finish(FinishReason.MATCHED_STRING, matched_stop=matched)
        if not params.stop_regex:
            return None
        text = rules.decode(request.progress.output_ids[-REGEX_TAIL_TOKENS:], params.skip_special_tokens)[-REGEX_TAIL_CHARS:]
        pattern = next((pattern for pattern in params.stop_regex if rules.search(pattern, text)), None)
    except StopRuleTooExpensive as error:
        return refused(str(error))
    except Exception as error:
        message = f"the output could not be searched for stop strings or stop patterns: {type(error).__name__}"
        return Finish(FinishReason.ABORT, error=ErrorCode.INTERNAL, message=message)
    return None if pattern is None else Finish(FinishReason.MATCHED_REGEX, matched_stop=pattern)


def _tail_text(request: Request, rules: TextRules) -> str:
    """Returns the end of the output, long enough to contain any stop string that the newest token completes.

    Decodes an estimated number of last tokens, and doubles the number until the text is long enough. The number cannot be
    computed, because tokens differ in their number of characters, and a skipped special token has none.
    """
    ids, count, skip = request.progress.output_ids, request.tail_tokens, request.params.skip_special_tokens
    enough = max(map(len, request.params.stop)) + len(rules.decode(ids[-1:], skip)) + 4  # U+FFFDs of a cut character
    text = rules.decode(ids[-count:], skip)
    while len(text) < enough and count < len(ids):
        count *= 2
        text = rules.decode(ids[-count:], skip)
    return text


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Returns the stop string that begins first in `text`, or None.

    If several stop strings begin at the same index, it returns the first of them in `stops`.

    This is SGLang's rule for the stop string that a response reports. The detokenizer's StopStringBuffer uses another rule. It
    cuts streamed text at the stop string that ends first, because it must not wait for longer stop strings.
    """
    best: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop)
        if at >= 0 and (best is None or at < best[0]):
            best = (at, stop)
    return best[1] if best else None

"""Applies the result of a step to requests, columns, memory and outputs.

If a row's request has ended since the plan, the row's result is dropped. If the request was retracted since the plan, the row's
sampled token still counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.counters import Counters
from rootstock_llm.services.worker.core.contracts.grammar import Matcher
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, Finish, FinishReason
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, StepResult
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.core.planning.step_rows import Step
from rootstock_llm.services.worker.core.requests.finish import TextRules, check_fault, check_finished, refused
from rootstock_llm.services.worker.core.requests.lifecycle import RequestLifecycle
from rootstock_llm.services.worker.core.requests.request import Outputs, Phase, Request, SlotColumns

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

_OUTSIDE_GRAMMAR = Finish(
    FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the sampled token does not fit the request's grammar"
)
_GIVEN_OUTSIDE_GRAMMAR = refused("the output does not fit the request's grammar", "output_ids")
_NO_VECTOR = Finish(FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the step returned no vector for this request")
_NO_SCORE = Finish(FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the step returned no score for this request")


class Intake:
    """Appends tokens to requests, and decides which requests end. Changes neither slots nor pages."""

    def __init__(self, vocab_size: int, rules: TextRules, counters: Counters) -> None:
        self._vocab_size = vocab_size
        self._rules = rules
        self._counters = counters

    def take(
        self,
        requests: list[Request],
        tokens: NDArray[np.int32],
        may_end: Mask,
        rows: I64,
        result: StepResult,
    ) -> tuple[dict[int, Finish], list[int]]:
        """Appends one token to each of n requests. The first four arguments are parallel columns.

        Args:
            requests: the requests.
            tokens: int32[n], the next token of each request.
            may_end: bool[n], whether the token may end the request or must advance a grammar. Otherwise, the token is only
                appended.
            rows: int64[n], the request's index in the dictionaries of `result`.
            result: the step's result.

        Returns:
            The endings by index in `requests`, and the indices of the requests whose grammar has added tokens.
        """
        assert len(requests) == len(tokens) == len(may_end) == len(rows), "the columns have equal lengths"
        endings: dict[int, Finish] = {}
        jumped: list[int] = []
        checked = np.flatnonzero(may_end).tolist()
        for at in checked:
            ending = self._before_output(requests[at], int(tokens[at]), int(rows[at]), result)
            if ending is not None:
                endings[at] = ending
        if endings:
            for at, (request, token) in enumerate(zip(requests, tokens.tolist(), strict=True)):
                if at not in endings:
                    request.progress.output_ids.append(token)
        else:
            for request, token in zip(requests, tokens.tolist(), strict=True):
                request.progress.output_ids.append(token)
        self._counters.generated_tokens_total += len(requests) - len(endings)
        if result.logprobs:
            for at, row in enumerate(rows.tolist()):
                if requests[at].wants_logprobs and at not in endings and row in result.logprobs:
                    requests[at].progress.logprobs.append(result.logprobs[row])
        for at in checked:
            if at not in endings:
                ending, has_jumped = self._after_output(requests[at])
                if ending is not None:
                    endings[at] = ending
                elif has_jumped:
                    jumped.append(at)
        return endings, jumped

    def take_given(self, request: Request) -> Finish | None:
        """Applies the given output of a request as if its last token had just been sampled.

        If the request has a grammar, its matcher must be set. The matcher accepts the tokens that it has not accepted in
        GrammarGate.replay().

        Returns:
            The ending, or None if the request continues.
        """
        ids, num_replayed = request.progress.output_ids, request.progress.num_replayed
        assert num_replayed < len(ids), "replay() leaves at least the last token"
        matcher = request.matcher
        if matcher is not None and not all(matcher.accept(token) for token in ids[num_replayed:-1]):
            ending: Finish | None = _refused(matcher, _GIVEN_OUTSIDE_GRAMMAR)
        else:
            ending, _ = self._after_output(request, _GIVEN_OUTSIDE_GRAMMAR)
        if matcher is not None:
            matcher.take_cost()  # so that this CPU time does not count as the time of a step
        return ending

    def take_one(self, request: Request, token: int, row: int, result: StepResult) -> tuple[Finish | None, bool]:
        """Applies one token to one request.

        Returns:
            The ending, or None if the request continues; and whether its grammar has added tokens.
        """
        one, here = np.array([token], dtype=np.int32), np.array([row], dtype=np.int64)
        endings, jumped = self.take([request], one, np.ones(1, dtype=np.bool_), here, result)
        return endings.get(0), bool(jumped)

    def _before_output(self, request: Request, token: int, row: int, result: StepResult) -> Finish | None:
        """Returns the ending of a request that gets no token, because of a fault or because it ends with its prompt.

        Returns None if the request gets its token.
        """
        params = request.params
        if params.samples:
            return check_fault(token, self._vocab_size, result.faults.get(row))
        if row in result.faults:
            return check_fault(0, self._vocab_size, result.faults[row])
        if params.embedding is not None:
            vector = result.embeddings.get(row)
            return _NO_VECTOR if vector is None else Finish(FinishReason.EMBEDDED, embedding=vector)
        if params.score is not None:
            values = result.label_logprobs.get(row)
            return _NO_SCORE if values is None else Finish(FinishReason.SCORED, label_logprobs=values)
        return Finish(FinishReason.LENGTH)

    def _after_output(self, request: Request, outside: Finish = _OUTSIDE_GRAMMAR) -> tuple[Finish | None, bool]:
        """Advances the grammar by the newest token and checks whether the request ends.

        Args:
            request: the request.
            outside: ending if the grammar does not allow the newest token.

        Returns:
            The ending, or None if the request continues; and whether the grammar has forced tokens into the output.
        """
        matcher = request.matcher
        if matcher is None:
            return check_finished(request, self._rules), False
        if not matcher.accept(request.progress.output_ids[-1]):
            return _refused(matcher, outside), False
        ending = check_finished(request, self._rules, matcher.terminated)
        if ending is None and request.jump:
            return self._jump(request, matcher)
        return ending, False

    def _jump(self, request: Request, matcher: Matcher) -> tuple[Finish | None, bool]:
        """Appends the tokens that the grammar forces, until a token ends the request.

        Returns:
            The ending, or None if the request continues; and whether tokens were appended to the output.
        """
        forced = matcher.forced()
        for index, token in enumerate(forced, 1):
            request.progress.output_ids.append(token)
            self._counters.generated_tokens_total += 1
            ending = check_finished(request, self._rules, index == len(forced) and matcher.terminated)
            if ending is not None:
                return ending, True
        return None, bool(forced)


def _counts_after_retraction(request: Request, row: int, result: StepResult) -> bool:
    """Returns whether a row's results are valid although its request was retracted after the plan."""
    return request.phase is Phase.WAITING and request.progress.flight_step == result.step_id and row not in result.faults


def _refused(matcher: Matcher, outside: Finish) -> Finish:
    if matcher.fault:
        return refused(matcher.fault, "grammar")
    return outside


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The tokens of a step with draft tokens. A row's run is its accepted draft tokens and the token sampled after them."""

    counts: I64  # [rows], number of tokens of each run
    firsts: I64  # [rows], index in result.tokens of each run's first token
    drafted: I64  # [rows], number of draft tokens of each row
    predicted: Mask  # [rows], see StepResult.predicted
    result: StepResult  # the step's result; here, faults, embeddings and label_logprobs map indices in `tokens`, not rows

    @classmethod
    def of(cls, plan: BatchPlan, result: StepResult) -> TokenRuns:
        """Computes the runs of a result whose `counts` is set."""
        assert result.counts is not None and len(result.counts) == plan.num_rows, "every row has a count"
        counts = result.counts.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        assert len(result.tokens) == counts.sum() and (not len(counts) or counts.min() > 0), "every row has a token"
        assert (counts[: plan.num_extend] == 1).all(), "extend rows have one token"
        drafted = np.zeros_like(counts) if result.drafted is None else result.drafted.astype(np.int64)
        assert not len(plan.drafts) or (drafted <= plan.drafts).all(), "the executor drafts at most the planned number"
        assert (counts <= drafted + 1).all(), "a run has at most one token more than the row's draft tokens"
        predicted = np.zeros(len(counts), dtype=np.bool_) if result.predicted is None else result.predicted
        assert (drafted[predicted] > 0).all(), "a row whose draft tokens came from a prediction has draft tokens"
        faults = {int(firsts[row] + counts[row]) - 1: fault for row, fault in result.faults.items()}
        embeddings = {int(firsts[row]): vector for row, vector in result.embeddings.items()}
        scores = {int(firsts[row]): values for row, values in result.label_logprobs.items()}
        result = replace(result, faults=faults, embeddings=embeddings, label_logprobs=scores)
        return cls(counts, firsts, drafted, predicted, result)

    def indices(self, row: int) -> range:
        """Returns the indices in result.tokens of the row's run."""
        first = int(self.firsts[row])
        return range(first, first + int(self.counts[row]))

    def record_drafts(self, request: Request, row: int, num_applied: int) -> None:
        """Adds a row's draft tokens to the request's verification results. The request took `num_applied` tokens of the run."""
        if drafted := int(self.drafted[row]):
            request.progress.verified = request.progress.verified.and_row(drafted, num_applied - 1, bool(self.predicted[row]))


class Committer:
    """Applies step results to requests, columns, memory and outputs."""

    def __init__(
        self,
        vocab_size: int,
        rules: TextRules,
        memory: KVMemory,
        columns: SlotColumns,
        counters: Counters,
        outputs: Outputs,
        lifecycle: RequestLifecycle,
        draft_controller: DraftController | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._memory, self._columns, self._counters, self._outputs = memory, columns, counters, outputs
        self._lifecycle = lifecycle
        self._draft_controller = draft_controller  # unset if the executor does not draft
        self._intake = Intake(vocab_size, rules, counters)

    def commit(self, step: Step, result: StepResult, now: float) -> None:
        """Applies the result of a step to its requests. Called once per step, in the order of the plans."""
        plan, columns = step.plan, self._columns
        assert result.step_id == plan.step_id, "results arrive in the order of the steps"
        run = None if result.counts is None else TokenRuns.of(plan, result)
        assert run is not None or len(result.tokens) == plan.num_rows == len(step.requests), "every row has a token"
        live = columns.epoch[plan.slots] == step.epochs
        sound = live & ~np.isin(np.arange(plan.num_rows), list(result.faults)) if result.faults else live
        if run is None:
            columns.committed[plan.slots[sound]] = (plan.starts + plan.num_tokens)[sound]
        else:
            self._commit_lengths(step, run, live, sound)
        self._commit_prompt_logprobs(step, result, sound)
        self._commit_routed_experts(step, result, sound)
        if not live.all():
            assert (columns.epoch[plan.slots] >= step.epochs).all(), "an epoch only rises"
            self._commit_without_lease(step, result, run, ~live, now)
        self._publish_extends(step, sound)
        fresh = plan.sample & live
        redundant = fresh & columns.redundant[plan.slots]
        if redundant.any():
            fresh &= ~redundant
            self._drop_redundant(step, result, np.flatnonzero(redundant), now)
        rows = np.flatnonzero(fresh)
        if len(rows) and run is None:
            self._commit_tokens(step, result, rows, now)
        elif len(rows) and run is not None:
            self._commit_runs(step, run, rows, now)
        if result.faults:
            self._end_unsampled(step, result, live & ~plan.sample, now)

    def take_given(self, request: Request, now: float) -> None:
        """Applies the given output of a waiting request, see Intake.take_given(). The output may end the request."""
        ending = self._intake.take_given(request)
        request.rekey()
        if ending is not None:
            self._lifecycle.end(request, ending, now)

    def _publish_extends(self, step: Step, sound: Mask) -> None:
        """Publishes the pages of the step's extend rows in the radix tree. Rows with a fault publish nothing."""
        for row in range(step.plan.num_extend):
            request = step.requests[row]
            if sound[row] and request.kv.lease is not None:
                committed = int(self._columns.committed[request.kv.lease.slot])
                assert committed * TOKEN_BYTES <= len(request.kv.token_key), "an extend row computes known tokens"
                self._memory.publish(request.kv.lease, request.kv.token_key[: committed * TOKEN_BYTES])
                if request.kv.reservation is not None and not step.plan.sample[row]:
                    self._lifecycle.announce(request)

    def _commit_routed_experts(self, step: Step, result: StepResult, sound: Mask) -> None:
        """Adds the routed experts of the step's rows to their requests, for the same rows as _commit_prompt_logprobs().

        If a request has no output and its row samples no token, its routed experts are added to the outputs of this step.
        Otherwise, they are added together with the request's next output tokens.
        """
        for row in step.plan.routed_rows.tolist():
            request, progress = step.requests[row], step.requests[row].progress
            if (sound[row] or _counts_after_retraction(request, row, result)) and row in result.routed_experts:
                progress.routed.append(result.routed_experts[row])
                progress.routed_done += len(result.routed_experts[row])
                progress.routed_planned = max(progress.routed_planned, progress.routed_done)
                if not progress.output_ids and not step.plan.sample[row]:
                    self._outputs.add_routed_experts(request)

    def _commit_prompt_logprobs(self, step: Step, result: StepResult, sound: Mask) -> None:
        """Adds the logprobs of prompt tokens to the outputs.

        If the request was retracted since the plan, the logprobs are added only if the row's sampled token counts. If the token
        does not count, the request will compute this chunk again.
        """
        for row in step.plan.prompt_logprob_rows.tolist():
            request = step.requests[row]
            progress = request.progress
            if (sound[row] or _counts_after_retraction(request, row, result)) and row in result.prompt_logprobs:
                values = result.prompt_logprobs[row]
                assert progress.logprob_done + len(values.values) <= request.num_prompt_tokens, "a prompt token has logprobs once"
                progress.logprob_done += len(values.values)
                progress.logprob_planned = max(progress.logprob_planned, progress.logprob_done)
                self._outputs.add_prompt_logprobs(request, values)

    def _end_unsampled(self, step: Step, result: StepResult, rows: Mask, now: float) -> None:
        """Ends each request whose row has a fault and samples no token."""
        for row, fault in result.faults.items():
            if rows[row] and (ending := check_fault(0, 1, fault)):
                self._lifecycle.end(step.requests[row], ending, now)

    def _drop_redundant(self, step: Step, result: StepResult, rows: I64, now: float) -> None:
        """Drops sampled tokens that the output already has, because the grammar forced them. A fault still ends the request."""
        self._columns.redundant[step.plan.slots[rows]] = False
        for row in rows.tolist():
            if row in result.faults and (ending := check_fault(0, 1, result.faults[row])):
                self._lifecycle.end(step.requests[row], ending, now)

    def _commit_lengths(self, step: Step, run: TokenRuns, live: Mask, sound: Mask) -> None:
        """Advances the committed lengths of the requests of a step with runs.

        The plan has counted all draft tokens in `computed` and `planned_out`. This method subtracts the rejected draft tokens.
        """
        plan, columns, extends = step.plan, self._columns, step.plan.num_extend
        slots = plan.slots[:extends][sound[:extends]]
        columns.committed[slots] = (plan.starts + plan.num_tokens)[:extends][sound[:extends]]
        slots, counts = plan.slots[extends:], run.counts[extends:]
        sound_rows, live_rows = sound[extends:], live[extends:]
        short = (plan.num_tokens[extends:] - counts)[live_rows]
        if self._memory.units is not None:
            mine = slots[live_rows]
            is_followed = columns.computed[mine] > columns.committed[mine] + plan.num_tokens[extends:][live_rows]
            self._memory.units.reject(mine[is_followed], short[is_followed])
        columns.committed[slots[sound_rows]] += counts[sound_rows]
        columns.computed[slots[live_rows]] -= short
        columns.planned_out[slots[live_rows]] -= short
        drafting = plan.drafts[extends:] > 0 if len(plan.drafts) else np.zeros(len(live_rows), dtype=np.bool_)
        rows = extends + np.flatnonzero(live_rows & drafting)
        if self._draft_controller is not None:
            self._draft_controller.learn(
                plan, plan.slots[rows].astype(np.int64), run.drafted[rows], run.counts[rows] - 1, run.result.seconds
            )
        self._counters.verified_rows_total += int((run.drafted > 0).sum())
        self._counters.drafted_tokens_total += int(run.drafted.sum())
        self._counters.accepted_tokens_total += int((counts - 1).sum())

    def _commit_runs(self, step: Step, run: TokenRuns, rows: I64, now: float) -> None:
        """Applies the first tokens of all runs, then the second tokens, and so on, like the tokens of successive steps.

        When a request ends or its grammar adds tokens, the rest of its run is dropped.
        """
        columns, slots = self._columns, step.plan.slots[rows]
        requests = [step.requests[row] for row in rows.tolist()]
        counts, firsts = run.counts[rows], run.firsts[rows]
        goes_on = np.ones(len(rows), dtype=np.bool_)
        endings: dict[int, Finish] = {}
        jumped: list[int] = []
        num_applied = np.zeros(len(rows), dtype=np.int64)
        for index in range(int(counts.max())):
            at = np.flatnonzero(goes_on & (counts > index))
            if not len(at):
                break
            indices, here = firsts[at] + index, slots[at]
            count = columns.num_out[here] + 1
            tokens = run.result.tokens[indices]
            may_end = self._may_end(here, tokens, count)
            if run.result.faults:
                may_end |= np.isin(indices, list(run.result.faults))
            ended_here, jumped_here = self._intake.take([requests[i] for i in at.tolist()], tokens, may_end, indices, run.result)
            columns.num_out[here] = count
            num_applied[at] += 1
            endings |= {int(at[i]): ending for i, ending in ended_here.items()}
            jumped += [int(at[i]) for i in jumped_here]
            goes_on[at[[*ended_here, *jumped_here]]] = False
        for i in np.flatnonzero(run.drafted[rows]).tolist():
            run.record_drafts(requests[i], int(rows[i]), int(num_applied[i]))
        cut = np.flatnonzero(~goes_on)
        for i in cut.tolist():  # the KV of the dropped tokens is not committed
            known = requests[i].num_prompt_tokens + int(columns.num_out[slots[i]])
            columns.committed[slots[i]] = min(int(columns.committed[slots[i]]), known - 1)
        for i in jumped:
            self._lifecycle.extend_again(requests[i])
        outputs = [request.progress.output_ids for request in requests]
        last = np.array([ids[-1] if ids else -1 for ids in outputs], dtype=np.int32)
        self._emit(slots, last, columns.num_out[slots], requests, endings)
        for i, ending in endings.items():
            self._lifecycle.end(requests[i], ending, now)

    def _may_end(self, slots: NDArray[np.int32], tokens: NDArray[np.int32], count: I64) -> Mask:
        """Returns whether each row's request may end with its new token, by the columns of its slot, as bool[rows].

        Args:
            slots: slot of each row.
            tokens: new token of each row.
            count: output tokens of each row, including the new one.
        """
        columns = self._columns
        may_end: Mask = (count >= columns.max_new[slots]) | columns.special[slots]
        may_end |= (columns.stop_ids[slots] == tokens[:, None]).any(axis=1) & (count >= columns.min_new[slots])
        may_end |= (tokens < 0) | (tokens >= self._vocab_size)
        return may_end

    def _commit_tokens(self, step: Step, result: StepResult, rows: I64, now: float) -> None:
        """Applies the sampled token of each row in `rows`."""
        columns = self._columns
        slots = step.plan.slots[rows]
        tokens = result.tokens[rows]
        requests = step.requests if len(rows) == len(step.requests) else [step.requests[r] for r in rows.tolist()]
        count = columns.num_out[slots] + 1
        may_end = self._may_end(slots, tokens, count)
        if result.faults:
            may_end |= np.isin(rows, list(result.faults))
        endings, jumped = self._intake.take(requests, tokens, may_end, rows, result)
        columns.num_out[slots] = count
        for at in jumped:
            self._lifecycle.extend_again(requests[at])
        if jumped:
            count = columns.num_out[slots]
        self._emit(slots, tokens, count, requests, endings)
        for at, ending in endings.items():
            self._lifecycle.end(requests[at], ending, now)

    def _emit(
        self,
        slots: NDArray[np.int32],
        tokens: NDArray[np.int32],
        count: I64,
        requests: list[Request],
        endings: dict[int, Finish],
    ) -> None:
        """Adds new tokens of continuing requests to the outputs: a request's first token, and then every `interval` tokens."""
        assert len(slots) == len(tokens) == len(count) == len(requests), "the columns have equal lengths"
        columns = self._columns
        sent = columns.sent[slots]
        due = (count - sent >= columns.interval[slots]) | (sent == 0)
        if endings:
            due[list(endings)] = False
        at = np.flatnonzero(due)
        if not len(at):
            return
        slots, tokens, count = slots[at], tokens[at], count[at]
        fresh = count - columns.sent[slots]
        columns.sent[slots] = count
        if (fresh == 1).all():
            parts = None
        else:
            parts = [requests[i].progress.output_ids[-n:] for i, n in zip(at.tolist(), fresh.tolist(), strict=True)]
        for peer, mine in _rows_by_peer(columns.peer[slots]):
            flat = tokens[mine].tolist() if parts is None else [t for i in mine.tolist() for t in parts[i]]
            self._outputs.add_rows(peer, columns.handle[slots[mine]].tolist(), fresh[mine].tolist(), flat)
        for i in np.flatnonzero(columns.wants_logprobs[slots]).tolist():
            self._outputs.add_logprobs(requests[int(at[i])], int(count[i] - fresh[i]), int(count[i]))
        for i in np.flatnonzero(columns.returns_experts[slots]).tolist():
            self._outputs.add_routed_experts(requests[int(at[i])])
        if self._draft_controller is not None:
            for i in np.flatnonzero(columns.predicted[slots]).tolist():
                self._outputs.add_predicted(requests[int(at[i])])

    def _commit_without_lease(self, step: Step, result: StepResult, run: TokenRuns | None, gone: Mask, now: float) -> None:
        """Applies the rows of requests that were retracted while the step was in flight. Drops the rows of ended requests."""
        for row in np.flatnonzero(gone & step.plan.sample).tolist():
            request = step.requests[row]
            progress = request.progress
            if request.phase is not Phase.WAITING or progress.flight_step != result.step_id:
                continue
            progress.flight_step = -1
            applied, indices = (result, range(row, row + 1)) if run is None else (run.result, run.indices(row))
            num_applied = 0
            for index in indices:
                ending, has_jumped = self._intake.take_one(request, int(applied.tokens[index]), index, applied)
                num_applied += 1
                if ending is not None or has_jumped:
                    break
            if run is not None:
                run.record_drafts(request, row, num_applied)
            request.rekey()
            if ending is not None:
                self._lifecycle.end(request, ending, now)
            elif len(progress.output_ids) - progress.num_sent >= request.interval or progress.num_sent == 0:
                self._outputs.add_news(request)


def _rows_by_peer(peers: I64) -> Iterator[tuple[int, I64]]:
    """Yields each gateway stream and the indices of its rows. The usual case of one stream takes less time."""
    if (peers == peers[0]).all():
        yield int(peers[0]), np.arange(len(peers))
        return
    for peer in np.unique(peers).tolist():
        yield peer, np.flatnonzero(peers == peer)

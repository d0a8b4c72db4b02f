"""Drives an executor with plans that a test makes instead of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from rootstock_llm.services.worker.core.contracts.plan import (
    BatchPlan,
    ForwardMode,
    PromptLogprobs,
    RowLogprobs,
    SamplingParams,
    SlotParams,
)
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, Masks
from rootstock_llm.services.worker.exec.executor import DeviceExecutor


@dataclass
class Sequence:
    """A request, its slot and KV pages, and its results."""

    prompt: list[int]
    slot: int
    params: SamplingParams
    pages: list[int] = field(default_factory=list)  # page numbers in the order of the tokens
    computed: int = 0  # tokens whose KV is computed
    named_pages: int = 0  # pages that a plan has already added to the slot's page table
    output: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    embedding: np.ndarray | None = None
    label_logprobs: np.ndarray | None = None
    stop_token_ids: tuple[int, ...] = ()
    admitted: bool = False  # whether a plan has admitted the request to its slot
    # Number of tokens at the beginning of `prompt` that are the client's; the rest is output of an earlier worker. -1: all tokens
    num_prompt_tokens: int = -1

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def greedy(max_new_tokens: int = 64, top_logprobs: int = -1) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, top_logprobs=top_logprobs)


def i32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _prompt_scores(row: int, sequence: Sequence, count: int) -> tuple[int, int, int] | None:
    """Returns (row, offset, next), entries of a plan's columns prompt_logprob_*.

    None if the row predicts no prompt token whose log probability was requested.
    """
    first, start, size = sequence.params.prompt_logprobs_from, sequence.computed, len(sequence.prompt)
    offset = max(0, first - 1 - start)
    if first < 0 or offset >= count or start + offset + 1 >= size:
        return None
    return row, offset, sequence.prompt[start + count] if start + count < size else -1


class Driver:
    """Runs steps of an executor.

    The window unit of a page has the number of the page. A slot has two states: a step reads one of them and writes the other.
    """

    def __init__(self, executor: Executor, page_size: int) -> None:
        self.executor = executor
        passes = executor.runner.passes if isinstance(executor, DeviceExecutor) else None
        self.has_windows = passes is not None and passes.window_table is not None
        self.has_states = passes is not None and passes.has_states
        self.states: dict[int, int] = {}  # state of each slot
        self.page_size = page_size
        self.next_page = 0
        self.step_id = 0

    def plan(self, rows: list[tuple[Sequence, int]]) -> BatchPlan:
        """Returns the plan of a step.

        Args:
            rows: (sequence, number of tokens to compute), extend rows first. A sequence whose prompt is computed decodes.
        """
        extends = [sequence.computed < len(sequence.prompt) for sequence, _ in rows]
        assert extends == sorted(extends, reverse=True)
        updates = [update for sequence, count in rows if (update := self._new_pages(sequence, count))]
        ids = [t for (s, n), extend in zip(rows, extends, strict=True) if extend for t in s.prompt[s.computed : s.computed + n]]
        admitted = tuple(self._admit(sequence) for sequence, _ in rows if not sequence.admitted)
        scored = [scores for row, (s, n) in enumerate(rows) if extends[row] and (scores := _prompt_scores(row, s, n))]
        self.step_id += 1
        plan = BatchPlan(
            step_id=self.step_id,
            mode=ForwardMode.MIXED,
            num_extend=sum(extends),
            slots=i32([sequence.slot for sequence, _ in rows]),
            starts=i32([sequence.computed for sequence, _ in rows]),
            num_tokens=i32([count for _, count in rows]),
            input_ids=i32(ids),
            sample=np.array([s.computed + n >= len(s.prompt) for s, n in rows], dtype=np.bool_),
            mask_rows=i32([]),
            prompt_logprob_rows=i32([row for row, _, _ in scored]),
            prompt_logprob_offsets=i32([offset for _, offset, _ in scored]),
            prompt_logprob_nexts=i32([after for _, _, after in scored]),
            admitted=admitted,
            table_slots=i32([slot for slot, _, _ in updates]),
            table_firsts=i32([first for _, first, _ in updates]),
            table_counts=i32([len(pages) for _, _, pages in updates]),
            table_pages=i32([page for _, _, pages in updates for page in pages]),
        )
        if self.has_windows:
            plan = replace(
                plan,
                window_slots=plan.table_slots,
                window_firsts=plan.table_firsts,
                window_counts=plan.table_counts,
                window_units=plan.table_pages,
            )
        if self.has_states:
            plan = replace(plan, **self._states(rows))
        for sequence, count in rows:
            sequence.computed += count
        return plan

    def _states(self, rows: list[tuple[Sequence, int]]) -> dict[str, np.ndarray]:
        before = [self.states.get(sequence.slot, -1) if sequence.computed else -1 for sequence, _ in rows]
        after = [2 * sequence.slot + int(unit == 2 * sequence.slot) for (sequence, _), unit in zip(rows, before, strict=True)]
        self.states.update({sequence.slot: unit for (sequence, _), unit in zip(rows, after, strict=True)})
        none = i32([-1] * len(rows))
        units = {"state_before": i32(before), "state_after": i32(after), "state_cuts": 0 * none, "state_at_cut": none}
        return units | {"state_starts": i32([sequence.computed for sequence, _ in rows])}

    def _new_pages(self, sequence: Sequence, count: int) -> tuple[int, int, list[int]] | None:
        needed = -(-(sequence.computed + count) // self.page_size)
        while len(sequence.pages) < needed:
            sequence.pages.append(self.next_page)
            self.next_page += 1
        first, sequence.named_pages = sequence.named_pages, max(needed, sequence.named_pages)
        return (sequence.slot, first, sequence.pages[first:needed]) if needed > first else None

    def _admit(self, sequence: Sequence) -> SlotParams:
        sequence.admitted = True
        size = len(sequence.prompt) if sequence.num_prompt_tokens < 0 else sequence.num_prompt_tokens
        params, stops = sequence.params, sequence.stop_token_ids
        return SlotParams(sequence.slot, size, params, stops, i32(sequence.prompt), drafted_for=params.speculative)

    def step(self, rows: list[tuple[Sequence, int]], masks: Masks | None = None) -> None:
        """Runs one step and adds its results to the sequences of the rows.

        Args:
            rows: see plan().
            masks: token masks by row number.
        """
        run = self.executor.forward(self.plan(rows))
        self.executor.sample(run, masks or {})
        result = self.executor.wait(run)
        assert not result.faults
        for row, (sequence, _) in enumerate(rows):
            if run.plan.sample[row] and sequence.params.score is None:
                sequence.output.append(int(result.tokens[row]))
            if row in result.logprobs:
                sequence.logprobs.append(result.logprobs[row])
            if row in result.prompt_logprobs:
                sequence.prompt_logprobs.append(result.prompt_logprobs[row])
            if row in result.embeddings:
                sequence.embedding = result.embeddings[row]
            if row in result.label_logprobs:
                sequence.label_logprobs = result.label_logprobs[row]

    def prefill(self, sequences: list[Sequence], chunk: int = 1 << 30) -> None:
        """Extends all sequences together, at most `chunk` tokens of each per step, until all prompts are computed."""
        while pending := [s for s in sequences if s.computed < len(s.prompt)]:
            self.step([(s, min(chunk, len(s.prompt) - s.computed)) for s in pending])

    def decode(self, sequences: list[Sequence], num_tokens: int) -> None:
        """Decodes until each sequence has `num_tokens` output tokens."""
        while pending := [s for s in sequences if len(s.output) < num_tokens]:
            self.step([(s, 1) for s in pending])

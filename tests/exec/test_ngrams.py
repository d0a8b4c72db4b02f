"""N-gram draft tokens from a request's own text, the client's predicted output and the operator's corpus."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.plan import I32, SamplingParams, SlotParams
from rootstock_llm.services.worker.exec.contracts.drafter import BETWEEN_TEXTS
from rootstock_llm.services.worker.exec.drafting import ngram
from rootstock_llm.services.worker.exec.drafting.ngram import MOST_INDEXES, NgramDrafter
from rootstock_llm.services.worker.exec.drafting.ngram_index import LONGEST, SHORTEST, NgramIndex

PROMPT = [90, 91, 92]
SAID = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def i32(values: Sequence[int]) -> I32:
    return np.array(values, dtype=np.int32)


def drafter_of(prediction: Sequence[int], output: Sequence[int] = (), corpus: Sequence[int] = ()) -> NgramDrafter:
    """Returns a drafter with a request in slot 0 whose prompt is computed.

    Args:
        prediction: token ids that the client predicts as output.
        output: output that the request had before its admission.
        corpus: token ids of the operator's texts.
    """
    drafter = NgramDrafter(NgramIndex(i32(corpus)) if corpus else None)
    text = [*PROMPT, *output]
    drafter.admit(SlotParams(0, len(PROMPT), SamplingParams(max_new_tokens=99), (), i32(text), i32(prediction)))
    drafter.set_tokens(0, 0, text[:2])  # in two chunks
    drafter.set_tokens(0, 2, text[2:])
    return drafter


def guess(drafter: NgramDrafter, most: int = 3) -> tuple[list[int], bool]:
    return drafter.propose({0: most})[0], drafter.used_prediction(0)


def standing(tokens: Sequence[int], tail: Sequence[int]) -> tuple[int, list[int]]:
    """Finds the longest suffix of `tail` in `tokens` with a next token. Returns its size and the indices of the next tokens."""
    for size in range(min(len(tail), LONGEST), SHORTEST - 1, -1):
        wanted = list(tail[-size:])
        places = [at for at in range(size, len(tokens)) if tokens[at] >= 0 and list(tokens[at - size : at]) == wanted]
        if places:
            return size, places
    return 0, []


def test_ngram_index_finds_all_positions_of_the_longest_match() -> None:
    rng, found = random.Random(4), set()
    for _ in range(60):
        tokens = [rng.choice((BETWEEN_TEXTS, 1, 2, 3, 4)) for _ in range(rng.randrange(40))]
        index = NgramIndex(i32(tokens))
        for _ in range(20):
            tail = [rng.randrange(1, 5) for _ in range(rng.randrange(7))]
            size, places = index.find(tail)
            assert (size, sorted(places.tolist())) == standing(tokens, tail)
            found.add(size)
    assert found == {0, 2, 3, 4}


def test_ngram_index_follows_the_most_frequent_continuation_within_a_text() -> None:
    tokens = [1, 2, 3, 5, BETWEEN_TEXTS, 1, 2, 3, 7, 8, BETWEEN_TEXTS, 1, 2, 3, 7, 5, 6, BETWEEN_TEXTS, 1, 2, 3]
    index = NgramIndex(i32(tokens))
    size, places = index.find([1, 2, 3])
    assert (size, len(places)) == (3, 3), "the last of the four positions has no continuation"
    assert index.tokens_from(index.likeliest(places), 9) == [7, 5, 6]


class TestPrediction:
    def test_predicted_tokens_are_drafted_while_the_output_follows_the_prediction(self) -> None:
        drafter = drafter_of(SAID)
        assert guess(drafter) == (SAID[:3], True)
        drafter.sampled(0, SAID[:4])
        assert guess(drafter) == (SAID[4:7], True)
        drafter.sampled(0, SAID[4:9])
        assert guess(drafter) == (SAID[9:], True), "the rest of the prediction must be drafted"
        drafter.sampled(0, SAID[9:])
        assert guess(drafter) == ([], False)

    def test_predicted_tokens_are_drafted_again_after_insertions_and_omissions(self) -> None:
        drafter = drafter_of(SAID)
        drafter.sampled(0, [10, 11, 50, 51])
        assert guess(drafter) == ([], False), "50 51, which is not in the prediction, must give no draft tokens"
        drafter.sampled(0, [12])
        assert guess(drafter) == ([], False)
        drafter.sampled(0, [13])
        assert guess(drafter) == ([14, 15, 16], True)
        drafter.sampled(0, [14, 17, 18])
        assert guess(drafter) == ([19], True)

    def test_prediction_prefers_the_nearest_of_equal_matches(self) -> None:
        """If the lines of a list begin with equal tokens, the match nearest to the expected position is usually right."""
        lines = [token for number in range(5) for token in (7, 8, 100 + number)]
        drafter = drafter_of(lines)
        drafter.sampled(0, [7, 8, 100, 7, 8, 55, 7, 8])
        assert guess(drafter, 1) == ([102], True)

    @pytest.mark.parametrize(("output", "expected"), [(SAID[:5], SAID[5:8]), ([10, 11, 60, 14, 15], SAID[6:9])])
    def test_prediction_continues_when_a_request_is_resumed_with_output(self, output: list[int], expected: list[int]) -> None:
        assert guess(drafter_of(SAID, output)) == (expected, True)

    def test_prediction_uses_the_new_tokens_when_a_grammar_replaces_sampled_tokens(self) -> None:
        drafter = drafter_of(SAID)
        drafter.sampled(0, [10, 11, 12])
        drafter.set_tokens(0, len(PROMPT) + 1, [11, 12, 13, 14])
        assert guess(drafter) == (SAID[5:8], True)
        drafter.set_tokens(0, len(PROMPT) + 2, [12, 13])
        assert guess(drafter) == (SAID[4:7], True), "the grammar has removed token 14"
        lines = drafter_of([7, 8, 1, 9, 7, 8, 1, 6])
        lines.sampled(0, [7, 8])
        lines.set_tokens(0, len(PROMPT) - 1, [PROMPT[-1], 7, 8, 1])
        assert guess(lines, 1) == ([9], True), "tokens that are reported twice count once"

    def test_prediction_position_is_the_length_of_the_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The drafter stores only the last tokens of the text, so it must count the output tokens.

        A chunk may begin at any position. A grammar's tokens may replace output tokens. If output tokens are removed or replaced,
        the position is unknown until the whole text is reported again.
        """
        monkeypatch.setattr(ngram, "MOST_TOKENS", 6)
        rng, seen = random.Random(7), set()
        for _ in range(300):
            prediction = [rng.randrange(3) for _ in range(40)]
            drafter, output, doubt = drafter_of(prediction), list[int](), False
            for _ in range(12):
                kind = rng.choice(("sampled", "told", "grammar", "admitted"))
                more = prediction[len(output) : len(output) + rng.randrange(1, 5)]
                more = [rng.randrange(3) if rng.random() < 0.03 else token for token in more]
                if kind == "sampled":
                    output += more
                    drafter.sampled(0, more)
                elif kind == "grammar":
                    kept = rng.randrange(max(0, len(output) - 3), len(output) + 1)
                    replaced = output[kept:]
                    output = [*output[:kept], *more]
                    drafter.set_tokens(0, len(PROMPT) + kept, more)
                    doubt = bool(output) and (doubt or len(more) < len(replaced) or replaced != more[: len(replaced)])
                else:
                    text = [*PROMPT, *output]
                    if kind == "admitted":
                        params = SlotParams(0, len(PROMPT), SamplingParams(max_new_tokens=99), (), i32(text), i32(prediction))
                        drafter.admit(params)
                        doubt = False
                    ends = [*sorted(rng.sample(range(1, len(text)), rng.randrange(3))), len(text)]
                    begin = rng.randrange(ends[0])
                    known_tokens = ends[0] - len(PROMPT)
                    doubt = known_tokens > 0 and (doubt or known_tokens < len(output))
                    for end in ends:
                        drafter.set_tokens(0, begin, text[begin:end])
                        begin = end
                ahead = prediction[len(output) :][:3] if not doubt and output == prediction[: len(output)] else []
                known = drafter._texts[0].prediction
                assert known is not None and known.next_tokens(3) == ahead
                seen.add((kind, doubt, bool(ahead), drafter._texts[0].first > len(PROMPT)))
        assert len(seen) >= 20, seen

    def test_longest_match_in_any_text_is_preferred(self) -> None:
        drafter = drafter_of([1, 2, 3, 40, 9, 8, 7, 6, 2, 3, 41])
        drafter.sampled(0, [0, 1, 2, 3, 77, 1, 2, 3])
        assert guess(drafter, 1) == ([40], True), "1 2 3 is in both texts; the prediction must be preferred"
        drafter.sampled(0, [78, 0, 1, 2, 3])
        assert guess(drafter, 1) == ([77], False), "the longer match 0 1 2 3, which is only in the output, must be preferred"

    def test_unused_indexes_are_dropped_and_rebuilt(self) -> None:
        drafter = NgramDrafter()
        for slot in range(MOST_INDEXES + 1):
            text = i32([*PROMPT, 5, 15, 16])
            drafter.admit(SlotParams(slot, len(PROMPT), SamplingParams(max_new_tokens=99), (), text, i32(SAID)))
        for slot in (*range(MOST_INDEXES + 1), 0):
            assert drafter.propose({slot: 2}) == {slot: [17, 18]} and drafter.used_prediction(slot)
        held = [text for text in drafter._texts.values() if text.prediction is not None and text.prediction._index is not None]
        assert len(held) <= MOST_INDEXES


def test_corpus_is_searched_last_and_only_for_matches_of_three_tokens() -> None:
    corpus = [1, 2, 3, 4, 5, BETWEEN_TEXTS, 2, 3, 6]
    drafter = drafter_of((), corpus=corpus)
    drafter.sampled(0, [2, 3])
    assert guess(drafter) == ([], False), "a match of two tokens must be too short for the corpus"
    drafter.sampled(0, [9, 1, 2, 3])
    assert guess(drafter, 5) == ([9, 1, 2, 3], False), "the match 2 3 in the request's own text must be preferred to the corpus"
    drafter = drafter_of((), corpus=corpus)
    drafter.sampled(0, [1, 2, 3])
    assert guess(drafter, 5) == ([4, 5], False), "a draft must not exceed its text of the corpus"

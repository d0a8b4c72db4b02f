"""No part of a stop string is ever given out, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.stop_hold import StopHold

NO_STOP = ""


@pytest.mark.by_day(one_in=2, seed=91)
@pytest.mark.parametrize(
    ("name", "stops", "pushes", "released", "matched", "include", "rest"),
    [
        ("no stop strings", [], ["ab", "c"], ["ab", "c"], NO_STOP, False, ""),
        ("no prefix of it", ["END"], ["hello"], ["hello"], NO_STOP, False, ""),
        ("a partial one is held, then released", ["END"], ["aE", "N", "x"], ["a", "", "ENx"], NO_STOP, False, ""),
        ("a partial one is flushed at the end", ["END"], ["aEN"], ["a"], NO_STOP, False, "EN"),
        ("cut before the match", ["END"], ["aE", "ND"], ["a", ""], "END", False, ""),
        ("cut after the match", ["END"], ["aE", "NDb"], ["a", ""], "END", True, "END"),
        ("found before the worker says so", ["END"], ["aEND", "b", "c"], ["a", "", ""], "END", False, ""),
        ("found and never confirmed", ["END"], ["aENDb", "c"], ["a", ""], NO_STOP, False, ""),
        ("first occurrence", ["ab"], ["xabyab"], ["x"], "ab", False, ""),
        ("overlapping itself", ["aab"], ["aaa", "b"], ["a", ""], "aab", False, ""),
        ("one inside another, the shorter ends it", ["abcd", "bc"], ["xabc"], ["xa"], "bc", False, ""),
        ("one inside another, the longer ends it", ["b", "abc"], ["xabc"], ["x"], "abc", False, ""),
        ("same start, the named one is included", ["ab", "abc"], ["abc"], [""], "abc", True, "abc"),
        ("a match of a pattern that is in no list", [], ["ab12"], ["ab12"], "12", False, ""),
        ("a match that is not in the text", ["END"], ["aE"], ["a"], "other", False, "E"),
        ("an empty stop string is none", [""], ["ab"], ["ab"], NO_STOP, False, ""),
    ],
)
def test_hold(
    name: str, stops: list[str], pushes: list[str], released: list[str], matched: str, include: bool, rest: str
) -> None:
    hold = StopHold(stops, include)
    assert [hold.push(text) for text in pushes] == released, name
    assert hold.finish(matched) == rest, name


LETTERS = st.text(st.sampled_from("abc"), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=3)


def first_match(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first, the longest of those that end there."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return None if not ends else (min(ends)[0] + min(ends)[1], min(ends)[0])


@given(pushes=st.lists(LETTERS, max_size=6), stops=STOPS, include=st.booleans())
def test_all_text_up_to_the_first_stop_string(pushes: list[str], stops: list[str], include: bool) -> None:
    hold, text = StopHold(stops, include), "".join(pushes)
    match = first_match(text, stops)
    out = "".join(hold.push(piece) for piece in pushes) + hold.finish(NO_STOP)
    assert out == (text if match is None else text[: match[include]])


@given(text=LETTERS, stops=STOPS)
def test_what_is_out_never_holds_the_start_of_the_match(text: str, stops: list[str]) -> None:
    hold, out = StopHold(stops, False), ""
    for char in text:
        out += hold.push(char)
        match = first_match(text, stops)
        assert match is None or len(out) <= match[0]


@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    hold = StopHold(stops, False)
    hold.push(text)
    prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
    if first_match(text, stops) is None:
        assert hold.held_chars == max((len(p) for p in prefixes if text.endswith(p)), default=0)

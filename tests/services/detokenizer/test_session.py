"""Tests of Session, the state of one Decode stream: rows in order, replay, limits and failures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from rootstock_llm.protos import detokenizer_pb2 as pb
from rootstock_llm.services.detokenizer import session as session_module
from rootstock_llm.services.detokenizer.session import BadBatch, DetokenizerMetrics, Session, TooManyOpen
from rootstock_llm.services.detokenizer.text import IncrementalDetokenizer
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer

Row = tuple[int, list[int], bool, str]


def new_session(tokenizer: HfTokenizer, max_open: int = 100) -> Session:
    return Session(tokenizer, max_open, DetokenizerMetrics(CollectorRegistry()))


def batch(
    rows: list[Row], opens: list[pb.DecodeOpen] | None = None, closes: list[int] | None = None, seq: int = 0
) -> pb.DecodeBatch:
    return pb.DecodeBatch(
        seq=seq,
        opens=opens or [],
        handles=[handle for handle, *_ in rows],
        counts=[len(ids) for _, ids, *_ in rows],
        token_ids=[i for _, ids, *_ in rows for i in ids],
        finished=[finished for *_, finished, _ in rows],
        matched_stops=[stop for *_, stop in rows],
        closes=closes or [],
    )


IDS = st.lists(st.integers(0, 620), max_size=30)
KINDS = ["byte_level", "byte_fallback", "wordpiece", "unigram"]


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize("kind", KINDS)
@given(
    ids=IDS, cut=st.integers(0, 30), stops=st.lists(st.sampled_from(["e", " th", "lo", "�"]), max_size=2), step=st.integers(1, 7)
)
def test_session_continues_the_text_exactly_after_a_replay(
    tokenizers: dict[str, HfTokenizer], kind: str, ids: list[int], cut: int, stops: list[str], step: int
) -> None:
    tokenizer = tokenizers[kind]
    ids = [1000 + i - 360 if kind == "byte_fallback" and i >= 360 else i for i in ids]
    tail = tokenizer.encode_batch(["tail"], False)[0]

    def run(session: Session, rest: list[int]) -> str:
        out = ""
        for at in range(0, len(rest), step):
            out += session.decode(batch([(1, rest[at : at + step], False, "")])).texts[0]
        return out

    def finish(session: Session) -> str:
        return str(session.decode(batch([(1, [], True, "")])).texts[0])

    straight, first, second = (new_session(tokenizer) for _ in range(3))
    opened = pb.DecodeOpen(handle=1, prompt_tail=tail, stop=stops)
    straight.decode(batch([], opens=[opened]))
    first.decode(batch([], opens=[opened]))
    whole = run(straight, ids) + finish(straight)
    before = run(first, ids[:cut])
    opened.replay_ids.extend(ids[:cut])
    opened.emitted_chars = len(before)
    second.decode(batch([], opens=[opened]))
    assert before + run(second, ids[cut:]) + finish(second) == whole


def test_replay_returns_only_the_text_that_was_not_sent_before(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode_batch(["hello there"], False)[0]
    opened = pb.DecodeOpen(handle=1, replay_ids=ids, emitted_chars=2)
    session = new_session(tokenizer)
    assert session.decode(batch([(1, [], False, "")], opens=[opened])).texts == ["llo there"]
    assert session.decode(batch([(1, [], True, "")])).texts == [""]


def test_session_answers_rows_in_order_and_lists_unknown_handles(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    one, two = tokenizer.encode_batch(["hello", "Kind"], False)
    opens = [pb.DecodeOpen(handle=7), pb.DecodeOpen(handle=3)]
    session = new_session(tokenizer)
    answer = session.decode(batch([(7, one, False, ""), (9, [1], False, ""), (3, two, False, "")], opens=opens, seq=42))
    assert (answer.seq, list(answer.handles), list(answer.texts), list(answer.unknown)) == (42, [7, 3], ["hello", "Kind"], [9])


def test_session_forgets_finished_and_closed_handles(tokenizers: dict[str, HfTokenizer]) -> None:
    registry = CollectorRegistry()
    session = Session(tokenizers["byte_level"], 10, DetokenizerMetrics(registry))
    session.decode(batch([], opens=[pb.DecodeOpen(handle=h) for h in range(4)]))
    session.decode(batch([(0, [], True, ""), (1, [], False, "")], closes=[1, 99]))
    assert list(session.decode(batch([(h, [], False, "") for h in range(4)])).unknown) == [0, 1]
    assert registry.get_sample_value("rootstock_detokenizer_open_requests") == 2
    session.close()
    assert registry.get_sample_value("rootstock_detokenizer_open_requests") == 0


def test_session_skips_special_tokens_by_default(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    eos = tokenizer.eos_token_id
    assert eos is not None
    opens = [pb.DecodeOpen(handle=1), pb.DecodeOpen(handle=2, skip_special_tokens=False)]
    texts = new_session(tokenizer).decode(batch([(1, [eos], True, ""), (2, [eos], True, "")], opens=opens)).texts
    assert list(texts) == ["", "<|im_end|>"]


def test_session_keeps_the_special_tokens_that_the_request_lists(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = [tokenizer.token_id(text) for text in ("<|im_start|>", "<|im_end|>")]
    marks = ["<|im_start|>", "[not of this model]"]
    opens = [pb.DecodeOpen(handle=1, kept_tokens=marks), pb.DecodeOpen(handle=2, kept_tokens=marks, skip_special_tokens=False)]
    texts = new_session(tokenizer).decode(batch([(1, ids, True, ""), (2, ids, True, "")], opens=opens)).texts
    assert list(texts) == ["<|im_start|>", "<|im_start|><|im_end|>"]
    with pytest.raises(BadBatch, match=r"^opens\.kept_tokens: "):
        new_session(tokenizer).decode(pb.DecodeBatch(opens=[pb.DecodeOpen(kept_tokens=["x"] * (limits.MAX_KEPT_TOKENS + 1))]))


def test_session_cuts_a_finished_row_at_the_stop_string(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode_batch(["hello, how are you"], False)[0]
    opens = [pb.DecodeOpen(handle=1, stop=["how"]), pb.DecodeOpen(handle=2, stop=["how"], include_stop=True)]
    texts = new_session(tokenizer).decode(batch([(1, ids, True, "how"), (2, ids, True, "how")], opens=opens)).texts
    assert list(texts) == ["hello, ", "hello, how"]


def test_stop_string_in_a_mark_cuts_no_text(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    text = "<|im_start|>final<|im_end|>The answer is 4."
    ids = tokenizer.encode_batch([text], False)[0]
    opened = pb.DecodeOpen(handle=1, stop=["|", "im_"], kept_tokens=["<|im_start|>", "<|im_end|>"])
    session = new_session(tokenizer)
    rows = [batch([(1, [token_id], False, "")], opens=[opened] if at == 0 else []) for at, token_id in enumerate(ids)]
    out = [session.decode(row).texts[0] for row in (*rows, batch([(1, [], True, "")]))]
    assert "".join(out) == text


def first_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the stop string that the worker names for this text: the one that begins first, or "" if there is none."""
    return min((stop for stop in stops if stop in text), key=text.find, default="")


def visible_text(parts: Sequence[str], marks: Sequence[str], stops: Sequence[str], named: str, include: bool) -> str:
    """Returns the client's text of an output, computed without increments.

    Args:
        parts: the text of each token. The stop strings are searched in the text without `marks`.
        named: the stop string that the worker names; "" for an output that no stop string has ended.
    """
    searched = "".join(part for part in parts if part not in marks)
    ends = [(searched.find(stop) + len(stop), -len(stop)) for stop in stops if stop in searched]
    cuts = [(end + minus_length, end) for end, minus_length in sorted(ends)[:1]]
    if named:
        cuts.append((searched.find(named), searched.find(named) + len(named)))
    if not cuts:
        return "".join(parts)
    start, end = min(reversed(cuts), key=lambda cut: cut[0])
    out, count = "", 0
    for part in parts:
        if part in marks:
            out += part if count <= start or (include and count < end) else ""
        else:
            out += part[: max(0, (end if include else start) - count)]
            count += len(part)
    return out


@pytest.mark.by_day(one_in=2, seed=3)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(
    output=st.lists(st.one_of(st.sampled_from("abcd"), st.integers(0, 1)), max_size=24),
    stops=st.lists(st.text(st.sampled_from("abcd<>|s_"), min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    worker_stops=st.booleans(),
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=8),
)
def test_text_is_cut_at_the_first_stop_string_of_the_text_without_special_tokens(
    tokenizers: dict[str, HfTokenizer],
    kind: str,
    output: list[str | int],
    stops: list[str],
    include: bool,
    worker_stops: bool,
    steps: list[int],
) -> None:
    tokenizer = tokenizers[kind]
    marks = {"byte_level": ["<|im_start|>", "<|im_end|>"], "byte_fallback": ["<s>", "</s>"]}[kind]
    names = [marks[part] if isinstance(part, int) else part for part in output]
    named = ""
    for length in range(len(names) if worker_stops else 0):
        named = first_stop("".join(name for name in names[: length + 1] if name not in marks), stops)
        if named:
            names = names[: length + 1]
            break
    ids = [token_id for name in names for token_id in [tokenizer.token_id(name)] if token_id is not None]
    assert len(ids) == len(names), "each part of the output is one token"
    tail = tokenizer.encode_batch(["a"], False)[0]
    opened = pb.DecodeOpen(handle=1, prompt_tail=tail, stop=stops, include_stop=include, kept_tokens=marks)
    session, out = new_session(tokenizer), ""
    session.decode(batch([], opens=[opened]))
    for step in (*steps, len(ids)):
        out += session.decode(batch([(1, ids[:step], False, "")])).texts[0]
        ids = ids[step:]
    out += session.decode(batch([(1, [], True, named)])).texts[0]
    assert out == visible_text(names, marks, stops, named, include)


def test_mark_replaces_an_incomplete_character_also_with_stop_strings(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    first, *rest = tokenizer.encode_batch(["🙂"], False)[0]
    mark = tokenizer.token_id("<|im_start|>")
    opens = [pb.DecodeOpen(handle=h, stop=["x"] * h, kept_tokens=["<|im_start|>"]) for h in (0, 1)]
    ids = [first, mark, *rest, *tokenizer.encode_batch(["a"], False)[0]]
    texts = new_session(tokenizer).decode(batch([(0, ids, True, ""), (1, ids, True, "")], opens=opens)).texts
    assert texts[0] == texts[1]
    assert texts[0].startswith("\ufffd<|im_start|>\ufffd")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("counts", pb.DecodeBatch(handles=[1], finished=[False], matched_stops=[""])),
        ("finished", pb.DecodeBatch(handles=[1], counts=[0], matched_stops=[""])),
        ("matched_stops", pb.DecodeBatch(handles=[1], counts=[0], finished=[False])),
        ("token_ids", pb.DecodeBatch(handles=[1], counts=[2], token_ids=[1], finished=[False], matched_stops=[""])),
        ("opens.stop", pb.DecodeBatch(opens=[pb.DecodeOpen(stop=["x"] * 17)])),
        ("opens.stop", pb.DecodeBatch(opens=[pb.DecodeOpen(stop=["x" * 1025])])),
    ],
)
def test_error_for_an_invalid_batch_names_the_field(
    tokenizers: dict[str, HfTokenizer], field: str, message: pb.DecodeBatch
) -> None:
    with pytest.raises(BadBatch, match=f"^{field}: "):
        new_session(tokenizers["byte_level"]).decode(message)


def test_session_refuses_to_open_more_requests_than_the_limit(tokenizers: dict[str, HfTokenizer]) -> None:
    session = new_session(tokenizers["byte_level"], max_open=2)
    session.decode(batch([], opens=[pb.DecodeOpen(handle=h) for h in (1, 2, 2)]))
    with pytest.raises(TooManyOpen):
        session.decode(batch([], opens=[pb.DecodeOpen(handle=3)]))


def test_session_decodes_other_rows_when_one_row_fails(
    tokenizers: dict[str, HfTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers["byte_level"]

    class Failing(IncrementalDetokenizer):
        def push(self, ids: Sequence[int]) -> str:
            if ids == [5]:
                raise RuntimeError("broken")
            return super().push(ids)

    monkeypatch.setattr(session_module, "IncrementalDetokenizer", Failing)
    session = new_session(tokenizer)
    answer = session.decode(batch([(1, [5], False, ""), (2, [6], False, "")], opens=[pb.DecodeOpen(handle=h) for h in (1, 2)]))
    assert (list(answer.handles), list(answer.unknown)) == ([2], [1])
    assert list(session.decode(batch([(1, [6], False, "")])).unknown) == [1]

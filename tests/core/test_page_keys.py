"""Page keys: a key depends on all tokens up to its page and on everything else that determines the page's KV."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock_llm.services.shared.index.prefix_index import cache_namespace
from rootstock_llm.services.worker.core.kv.radix_cache import retired_name, salt_of_tree, tree_name
from rootstock_llm.services.worker.core.tiers.page_keys import (
    KEY_BYTES,
    SECRET_BYTES,
    TAG_BYTES,
    UNSALTED,
    PageKeys,
    leading,
    tag_of,
)

PAGE = 4
SECRET = bytes(range(SECRET_BYTES))

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)
pages = st.integers(1, 8).flatmap(lambda n: st.lists(st.integers(0, 2**31 - 1), min_size=n * PAGE, max_size=n * PAGE))


def data(ids: list[int]) -> bytes:
    return np.array(ids, dtype=np.int32).tobytes()


def keys_of(ids: list[int], secret: bytes = SECRET, layout: bytes = b"l", tree: str = "r\n0:t") -> list[bytes]:
    keys = PageKeys(secret, layout, PAGE)
    return keys.after(keys.root(tree), data(ids))


@given(tokens)
def test_each_whole_page_has_a_unique_page_key(ids: list[int]) -> None:
    keys = keys_of(ids)
    assert len(keys) == len(ids) // PAGE == len(set(keys))
    assert all(len(key) == KEY_BYTES for key in keys)


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(
    "other",
    [
        {"secret": bytes(SECRET_BYTES)},
        {"layout": b"l2"},
        {"layout": b""},
        {"tree": "r\n0:t2"},
        {"tree": ""},
        {"layout": b"lr\n0:t", "tree": ""},
        {"layout": b"", "tree": "lr\n0:t"},
    ],
)
@given(ids=pages)
def test_page_keys_differ_when_secret_or_layout_or_tree_differs(other: dict[str, object], ids: list[int]) -> None:
    one, another = ({key[TAG_BYTES:] for key in keys} for keys in (keys_of(ids), keys_of(ids, **other)))  # type: ignore[arg-type]
    assert not one & another, "keys without their tags differ, too"
    assert not set(keys_of(ids, tree="")) & set(keys_of(ids, tree="", secret=bytes(SECRET_BYTES))), (
        "keys without a salt differ, too"
    )


@given(salt=st.text(min_size=1, max_size=12), lora=st.text(max_size=4), ids=pages)
def test_page_keys_begin_with_a_tag_that_depends_on_the_salt_and_the_secret(salt: str, lora: str, ids: list[int]) -> None:
    keys = PageKeys(SECRET, b"l", PAGE)
    names = [tree_name(revision, cache_namespace(adapter, salt)) for revision in ("", "f00d") for adapter in ("", lora)]
    names += [retired_name(name, at) for at, name in enumerate(names)]
    assert [salt_of_tree(name) for name in names] == [salt] * len(names) and len({*names[-4:]}) == 4
    assert {tag_of(key) for name in names for key in keys_of(ids, tree=name)} == {keys.tag(salt)}
    assert PageKeys(bytes(SECRET_BYTES), b"l", PAGE).tag(salt) != keys.tag(salt) != keys.tag(salt + "x")
    assert keys.tag(salt) != UNSALTED
    assert {tag_of(key) for key in keys_of(ids, tree=tree_name("f00d", cache_namespace(lora, "")))} == {UNSALTED}


@given(ids=pages, at=st.integers(0), by=st.integers(1, 2**31 - 1))
def test_changed_token_changes_the_key_of_that_page_and_of_all_later_pages(ids: list[int], at: int, by: int) -> None:
    at %= len(ids)
    changed = [*ids[:at], (ids[at] + by) % 2**31, *ids[at + 1 :]]
    same = [one == other for one, other in zip(keys_of(ids), keys_of(changed), strict=True)]
    assert same == [number < at // PAGE for number in range(len(same))]


@given(ids=tokens, cuts=st.lists(st.integers(0, 10)))
def test_page_keys_are_equal_when_a_list_of_keys_is_extended_in_parts(ids: list[int], cuts: list[int]) -> None:
    keys = PageKeys(SECRET, b"l", PAGE)
    made: list[bytes] = []
    for end in sorted(min(cut, len(ids) // PAGE) for cut in [*cuts, 10]):
        keys.extend(made, keys.root("r\n0:t"), data(ids), end)
        assert len(made) == end
    assert made == keys_of(ids)


@given(ids=pages, at=st.integers(0))
def test_page_keys_can_be_computed_from_the_key_of_the_previous_page(ids: list[int], at: int) -> None:
    whole = keys_of(ids)
    at = 1 + at % len(whole)
    assert PageKeys(SECRET, b"l", PAGE).after(whole[at - 1], data(ids[at * PAGE :])) == whole[at:]


def test_extend_keeps_page_keys_beyond_the_requested_number() -> None:
    keys = PageKeys(SECRET, b"l", PAGE)
    made = keys_of([1] * 12)
    keys.extend(made, keys.root("r\n0:t"), data([1] * 12), 2)
    assert len(made) == 3


def test_page_keys_refuse_an_incomplete_page() -> None:
    keys = PageKeys(SECRET, b"l", PAGE)
    with pytest.raises(AssertionError, match="whole pages"):
        keys.extend([], keys.root("r\n0:t"), data([1] * 7), 2)


def test_page_keys_refuse_a_short_secret() -> None:
    with pytest.raises(AssertionError, match="secret"):
        PageKeys(SECRET[1:], b"l", PAGE)


@pytest.mark.parametrize(("held", "count"), [("", 0), ("a", 1), ("abd", 2), ("bcd", 0), ("abcd", 4)])
def test_number_of_leading_cached_keys_ends_at_the_first_missing_key(held: str, count: int) -> None:
    assert leading([letter.encode() for letter in "abcd"], {letter.encode() for letter in held}) == count


def test_parts_of_units_have_unique_keys_with_the_tag_of_their_page() -> None:
    keys = PageKeys(SECRET, b"l", PAGE)
    made = keys.after(keys.root("r\n4:salt0:t"), data([1] * 12))
    parts = [part for key in made for group in (1, 2) for part in keys.parts(key, group, 5)]
    assert len({*made, *parts}) == 3 + 3 * 2 * 5
    assert {tag_of(part) for part in parts} == {tag_of(made[0])} and all(len(part) == KEY_BYTES for part in parts)
    assert keys.parts(made[0], 1, 2) == keys.parts(made[0], 1, 5)[:2]
    assert keys.parts(made[0], 1, 1) != PageKeys(bytes(SECRET_BYTES), b"l", PAGE).parts(made[0], 1, 1)

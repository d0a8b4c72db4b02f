"""Decides at which positions a text may be cut so that the ids of the two parts, joined, are the ids of the whole text.

The decision follows the steps of the tokenizer's description (tokenizer.json). A cut is allowed if two conditions hold. First,
every step gives the same result for the parts as for the whole. Second, a step splits the text at the cut, or no token of the
model spans the cut. If a tokenizer has a step that this file does not know, its texts are never cut.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import AddedToken

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.tokenizer.pattern import NotUnderstood, Pattern, is_space, read_pattern

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the pattern of the ByteLevel step
BLANK_BRANCHES = frozenset((r"\s+(?!\S)", r"\s+", r"\s*[\r\n]+", r"\s*[\r\n]"))
METASPACE = "▁"
# Characters with which the second part may begin. No Unicode normal form joins them to the character before them.
BEGINNINGS = frozenset(string.punctuation + " \n\t" + "、。，！？：；「」『』（）【】《》")
_ENDINGS = frozenset("LNPS")  # Unicode categories of the non-ASCII characters with which the first part may end
_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")

Allows = Callable[[str, str], bool]  # (character before the cut, character after the cut) → whether the cut is allowed


def _always(_before: str, _after: str) -> bool:
    return True


def _never(_before: str, _after: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Step:
    """The effect of a pre-tokenizer on cuts."""

    keeps: Allows = _always  # whether the step gives the same result for the parts as for the whole
    splits: Allows = _never  # whether the step splits the text at the cut
    # Whether the step splits a run of spaces, and each part of such a run, nowhere or only before the last space.
    keeps_blanks: bool = True


class UnknownStep(Exception):
    """The tokenizer's description has a step whose effect on cuts this file does not know."""


@dataclass(slots=True)
class _Normalization:
    """The effect of normalization on single characters."""

    drops_blank: bool = False  # whether normalization adds a blank before a text, so that a part drops its own first blank
    lowers: bool = False  # whether normalization converts to lower case
    ascii_only: bool = False  # whether the effect of normalization is known only for ASCII characters
    replaced: dict[str, str] = field(default_factory=dict)  # replacement of single characters
    pairs: set[tuple[str, str]] = field(default_factory=set)  # neighbouring characters in the texts to replace

    def of(self, char: str) -> str:
        found = self.replaced.get(char, char)
        return found.lower() if self.lowers else found


class Boundaries:
    """The positions at which the texts of one tokenizer may be cut. Thread-safe."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer.inner
        self._is_byte_level = tokenizer.is_byte_level
        self._model = self._tokenizer.model
        self._is_bpe = type(self._model).__name__ == "BPE"
        self._added: list[AddedToken] = list(self._tokenizer.get_added_tokens_decoder().values())
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)  # length of the longest token
        self._steps: list[Step] = []
        self._normal = _Normalization()
        self._begins_blank = False  # whether every part except the first must begin with a blank
        self._has_metaspace = False
        self._known = self._read()  # whether this file knows all steps; otherwise, no text is cut
        self._added_texts = tuple(self._texts_of_added())
        self._added_pairs = {pair for text in self._added_texts for pair in itertools.pairwise(text)}
        self._allowed: dict[str, bool] = {}  # results of _allows() by the two characters around a cut

    @property
    def drops_blank(self) -> bool:
        """Whether a part that begins with a blank is encoded without it, because normalization adds a blank."""
        return self._normal.drops_blank

    def allows(self, text: str, at: int) -> bool:
        """Whether the text may be cut before `text[at]`: the joined ids of the parts are then the ids of the text.

        Needs `0 < at < len(text)`. False if this file cannot tell.
        """
        pair = text[at - 1 : at + 1]
        found = self._allowed.get(pair)
        if found is None:
            found = self._allowed[pair] = self._known and self._allows(*pair)
            if len(self._allowed) > 1 << 16:
                self._allowed.clear()
        return found and not (self.drops_blank and self._is_marked(text, at))

    @functools.cached_property
    def allows_blanks(self) -> bool:
        """Whether a run of blanks may be cut where stitches() is true and each side has at least 2 * max_token_chars blanks."""
        if not self._known or not self._is_bpe or self._absorbs_blanks:
            return False
        if (" ", " ") in self._added_pairs or any(not text.strip() for text in self._added_texts):
            return False
        return all(step.keeps_blanks for step in self._steps)

    def stitches(self, last: int, first: int) -> bool:
        """Whether the model encodes the joined text of two tokens as exactly these two tokens.

        If that is true for all neighbouring tokens of a word, byte-pair encoding gives exactly these tokens for the word.
        The reason: a first merge across the border between two of these tokens would also happen in the joined text of the two.
        """
        texts = (self._tokenizer.id_to_token(last) or "", self._tokenizer.id_to_token(first) or "")
        return [token.id for token in self._model.tokenize("".join(texts))] == [last, first]

    def blanks_in(self, token_id: int) -> int:
        """Returns the number of blanks that the token stands for, or 0 if it also stands for other characters."""
        text = self._tokenizer.id_to_token(token_id) or ""
        return len(text) if text and not text.strip("Ġ" if self._is_byte_level else METASPACE) else 0

    @functools.cached_property
    def _absorbs_blanks(self) -> bool:
        return any(token.lstrip or token.rstrip for token in self._added)

    def _texts_of_added(self) -> Iterator[str]:
        """Yields the texts that match added tokens, also in normalized form."""
        normalizer = self._tokenizer.normalizer
        for token in self._added:
            yield token.content
            if token.normalized and normalizer is not None:
                yield normalizer.normalize_str(token.content).replace(METASPACE, " ")

    def _is_marked(self, text: str, at: int) -> bool:
        """Whether normalization may add its blank elsewhere than at the beginning of the part after this cut.

        True if an added token ends at the cut, or if an added token begins at the cut or one character later. Also true if at
        most one character follows the cut.
        """
        texts = self._added_texts
        return text.startswith(texts, at) or text.startswith(texts, at + 1) or text.endswith(texts, 0, at) or at + 1 >= len(text)

    def _allows(self, before: str, after: str) -> bool:
        if after not in BEGINNINGS or not self._may_end(before) or (self._begins_blank and after != " "):
            return False
        left, right = self._normal.of(before), self._normal.of(after)
        if {(before, after), (left, right), (before.lower(), after.lower())} & (self._added_pairs | self._normal.pairs):
            return False
        if self._touches_added(before, after) or not all(step.keeps(left, right) for step in self._steps):
            return False
        return any(step.splits(left, right) for step in self._steps) or self._no_token_spans(left, right)

    def _may_end(self, char: str) -> bool:
        if is_space(char):
            return char in " \n\t" and not self._absorbs_blanks
        if char.isascii():
            return char.isprintable()
        category = unicodedata.category(char)
        # A category that has not changed since Unicode 3.2 is the same in the Unicode versions of all libraries.
        is_stable = unicodedata.ucd_3_2_0.category(char) == category
        return (
            not self._normal.ascii_only
            and category[0] in _ENDINGS
            and category not in ("Lm", "Sk")
            and is_stable
            and all(unicodedata.is_normalized(form, char) for form in _FORMS)
        )

    def _touches_added(self, before: str, after: str) -> bool:
        """Whether an added token whose match depends on its neighbours (single_word, rstrip) may end or begin at the cut."""
        for token in self._added:
            text = token.content.lower()
            ends, begins = text[-1:] == before.lower(), text[:1] == after.lower()
            if (token.single_word and (ends or begins)) or (token.rstrip and ends and is_space(after)):
                return True
        return False

    def _no_token_spans(self, before: str, after: str) -> bool:
        """Whether no token of a model without pre-tokenization spans the cut.

        Byte-pair encoding never merges two characters that are neighbours in no token.
        """
        flags = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
        if not self._is_bpe or self._is_byte_level or any(getattr(self._model, name) for name in flags):
            return False
        pair = tuple(METASPACE if char == " " and self._has_metaspace else char for char in (before, after))
        return set(pair) <= self._neighbours[0] and pair not in self._neighbours[1]

    @functools.cached_property
    def _neighbours(self) -> tuple[frozenset[str], frozenset[tuple[str, ...]]]:
        """All characters that are tokens, and all pairs of neighbouring characters within tokens."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        pairs = frozenset(pair for token in vocabulary for pair in itertools.pairwise(token))
        return frozenset(token for token in vocabulary if len(token) == 1), pairs

    def _read(self) -> bool:
        try:
            if getattr(self._model, "dropout", None):
                raise UnknownStep
            for one in _listed(self._tokenizer.normalizer, "normalizers"):
                self._read_normalizer(one)
            if self._normal.drops_blank and (self._normal.of(" ") != METASPACE or self._normal.lowers):
                raise UnknownStep
            self._begins_blank = self._normal.drops_blank
            pre_tokenizers = _listed(self._tokenizer.pre_tokenizer, "pretokenizers")
            if any(one["type"] in ("ByteLevel", "Metaspace") for one in pre_tokenizers[:-1]):
                raise UnknownStep  # these steps change the characters that later steps read
            self._steps = [self._pre_tokenizer(one) for one in pre_tokenizers]
        except (UnknownStep, NotUnderstood):
            return False
        return True

    def _read_normalizer(self, spec: dict[str, Any]) -> None:
        normal, kind = self._normal, spec["type"]
        if kind in _FORMS:
            normal.ascii_only |= kind in ("NFKC", "NFKD")
        elif kind == "Prepend" and spec["prepend"] == METASPACE:
            normal.drops_blank = True
        elif kind == "Replace" and "String" in spec["pattern"]:
            text = spec["pattern"]["String"]
            normal.pairs.update(itertools.pairwise(text))
            if len(text) == 1 and len(spec["content"]) == 1:
                normal.replaced[text] = spec["content"]
            elif len(text) == 1:
                raise UnknownStep
        elif kind in ("Lowercase", "StripAccents", "BertNormalizer"):
            normal.ascii_only = True
            normal.lowers |= kind == "Lowercase" or (kind == "BertNormalizer" and spec["lowercase"])
        else:
            raise UnknownStep

    def _pre_tokenizer(self, spec: dict[str, Any]) -> Step:
        match spec["type"]:
            case "ByteLevel":
                self._begins_blank |= spec["add_prefix_space"]
                return _matches(read_pattern(GPT2)) if spec.get("use_regex", True) else Step()
            case "Metaspace" if spec["replacement"] == METASPACE:
                self._begins_blank |= spec.get("prepend_scheme", "always") != "never"
                self._has_metaspace = True
                splits = spec.get("split", True)
                return Step(splits=(lambda _, after: after in (" ", METASPACE)) if splits else _never, keeps_blanks=not splits)
            case "Split":
                return _split(spec)
            case "Digits":
                return Step(keeps=lambda *pair: not all(map(str.isnumeric, pair)))
            case "Punctuation":
                return Step(keeps=lambda *pair: not all(unicodedata.category(char)[0] in "PS" for char in pair))
            case "BertPreTokenizer" | "Whitespace" | "WhitespaceSplit":
                return Step(keeps=lambda _, after: is_space(after), splits=lambda _, after: is_space(after), keeps_blanks=False)
        raise UnknownStep


def _split(spec: dict[str, Any]) -> Step:
    behavior, inverted = spec["behavior"], spec["invert"]
    if "String" in spec["pattern"]:
        mark = spec["pattern"]["String"]
        if len(mark) != 1:
            raise UnknownStep
        return Step(keeps=lambda *pair: mark not in pair, keeps_blanks=mark != " ")
    if (behavior, inverted) not in (("Isolated", False), ("Removed", True)):
        raise UnknownStep
    return _matches(read_pattern(spec["pattern"]["Regex"]))


def _matches(pattern: Pattern) -> Step:
    def splits(before: str, after: str) -> bool:
        return pattern.parts(before, after) and pattern.begins_at(after)

    return Step(pattern.parts, splits, _keeps_blanks(pattern))


def _keeps_blanks(pattern: Pattern) -> bool:
    r"""Whether the pattern splits a run of blanks only as Step.keeps_blanks permits.

    True if the pattern matches no blank. Also true if it has the branch `\s+`, and only branches of BLANK_BRANCHES can match two
    neighbouring blanks, or begin and end with a blank. From any position in a run of blanks, these branches match the rest of the
    run, the rest without its last blank, or the part up to a line break.
    """
    if not pattern.can_have(" "):
        return True
    if any(left.contains(" ") and right.contains(" ") for left, right in pattern.follows if not _of_blanks(pattern, left)):
        return False
    others = [branch for branch in pattern.branches if branch.text not in BLANK_BRANCHES]
    alone = [b for b in others if any(p.contains(" ") for p in b.body.first) and any(p.contains(" ") for p in b.body.last)]
    return not alone and any(branch.text == r"\s+" for branch in pattern.branches)


def _of_blanks(pattern: Pattern, position: object) -> bool:
    bodies = [branch.body for branch in pattern.branches if branch.text in BLANK_BRANCHES]
    return any(position is one for body in bodies for one in (*body.first, *body.last))


def _listed(step: Any, key: str) -> list[dict[str, Any]]:
    """Returns the descriptions of all steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    return [] if step is None else _flat(json.loads(step.__getstate__()), key)


def _flat(spec: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return [one for inner in spec[key] for one in _flat(inner, key)] if spec["type"] == "Sequence" else [spec]

"""Decodes output ids to text: incrementally for one request, cut at stop strings, or token by token for log probabilities.

Definition of the incremental text: let C be the last ids of the prompt and O all output ids, both without skipped and unknown
ids. The text of O is `decode(C + O)[len(decode(C)):]`. With an empty C it is `decode(O)`. Metaspace and WordPiece decoders drop
a leading space only at the start of a sequence. Because C precedes O, the first output word keeps its space. Two rules go beyond
this definition:

- A character whose bytes are spread over several tokens belongs to the token with its last byte, even if it began in the prompt.
- A run of byte-fallback tokens (<0x80> to <0xFF>) keeps its valid characters and gives one U+FFFD per other byte. The
  `tokenizers` library replaces every byte of a run that has an error anywhere, so a later byte would change text that is
  already sent.

Byte tokens go through an incremental UTF-8 decoder, which buffers at most 3 bytes. Text tokens are decoded together with the text
tokens directly before them, as with SGLang's surrogate and read offsets. The cost of a token is therefore independent of the
length of the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8  # text tokens that are decoded before the new tokens; most decoders need one to keep a leading space
MAX_PENDING_TOKENS = 4  # a character has at most 4 bytes, so U+FFFD at the end of the text of 4 tokens never becomes a character
ONE_PER_BYTE = "rootstock-replace-each-byte"  # name of the codec error handler below


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(ONE_PER_BYTE, _replace_each_byte)


class IncrementalDetokenizer:
    """The decoding state of one request. Calls must not overlap.

    `push` returns each character once, as soon as no later id can change it. The concatenated text does not depend on how the ids
    are distributed over the calls.
    """

    def __init__(
        self, tokenizer: HfTokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool, kept_tokens: Sequence[str] = ()
    ) -> None:
        """Decodes the end of the prompt as context, without returning its text.

        Args:
            kept_tokens: texts of special tokens that are not skipped even if skip_special_tokens is set. Unknown texts are
                ignored.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Ids of the marks: special tokens that stay in the text although the other special tokens are skipped.
        self.mark_ids: frozenset[int] = frozenset()
        if self._skipped and kept_tokens:
            self.mark_ids = self._skipped.intersection([tokenizer.token_id(text) for text in kept_tokens])
            self._skipped -= self.mark_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace" if tokenizer.is_byte_level else ONE_PER_BYTE)
        # Tokens whose text was returned. They are decoded before new tokens, so that a new token never starts the sequence.
        self._context: list[int] = []
        self._context_chars = 0
        self._pending: list[int] = []  # tokens after the context, whose text was not returned yet
        self.push(prompt_tail)
        self._flush_text()

    def push(self, ids: Sequence[int]) -> str:
        """Appends ids and returns the new text that no later id can change."""
        if self._tokenizer.is_byte_level:
            bytes_of = self._tokenizer.token_bytes
            return self._utf8.decode(b"".join(bytes_of(i) or b"" for i in ids if i not in self._skipped))
        out: list[str] = []
        for token_id in ids:
            if token_id in self._skipped:
                continue
            raw = self._tokenizer.token_bytes(token_id)
            if raw is None:
                out.append(self._utf8.decode(b"", final=True))
                self._pending.append(token_id)
            elif raw:
                if self._pending:
                    out.append(self._flush_text())
                out.append(self._utf8.decode(raw))
                if not self._context and self._tokenizer.anchor_id is not None:
                    self._set_context([self._tokenizer.anchor_id])  # so that the next text token does not start the sequence
        if self._pending:
            out.append(self._final_text())
        return "".join(out)

    def finish(self) -> str:
        """Returns the text that push() has not returned yet, with U+FFFD for bytes that form no character.

        Later ids may follow. They do not complete a character whose first bytes this call has replaced.
        """
        return self._flush_text() + self._utf8.decode(b"", final=True)

    def _final_text(self) -> str:
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._release(text)

    def _flush_text(self) -> str:
        return self._release(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        return self._tokenizer.decode(self._context + self._pending, False)[self._context_chars :]

    def _release(self, text: str) -> str:
        """Makes the pending tokens the context of later tokens, and returns `text`."""
        self._set_context(self._pending[-CONTEXT_TOKENS:])
        self._pending = []
        return text

    def _set_context(self, ids: list[int]) -> None:
        self._context, self._context_chars = ids, len(self._tokenizer.decode(ids, False))


class _StopMatcher:
    """The Knuth-Morris-Pratt automaton of one stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # length of the longest prefix of the stop string that is a suffix of the text so far
        # Per prefix length: length of the longest proper prefix that is also a suffix. Computed when it is first needed.
        self._borders = [0]

    def feed(self, text: str) -> int | None:
        """Returns the index in `text` after the first complete match, or None. Must not be called again after a match."""
        at = 0
        while at < len(text):
            if self.matched == 0:
                at = text.find(self.stop[0], at)
                if at < 0:
                    return None
            while self.matched and self.stop[self.matched] != text[at]:
                self.matched = self._border_of(self.matched)
            self.matched += self.stop[self.matched] == text[at]
            at += 1
            if self.matched == len(self.stop):
                return at
        return None

    def _border_of(self, length: int) -> int:
        """Returns the length of the longest proper prefix of `stop[:length]` that is also its suffix."""
        stop, borders = self.stop, self._borders
        for at in range(len(borders), length):
            border = borders[at - 1]
            while border and stop[at] != stop[border]:
                border = borders[border - 1]
            borders.append(border + (stop[at] == stop[border]))
        return borders[length - 1]


class StopStringBuffer:
    """Buffers text of one request that is, or may become, a stop string. Calls must not overlap.

    The worker decides whether a stop string ends the request, and names the stop string. This buffer only cuts the text.
    Worker and buffer search for stop strings in different ways:
    | | worker (`first_stop` in the scheduler core) | this buffer |
    | --- | --- | --- |
    | reads | the end of the text, once per token | each character once |
    | prefers the stop string | that begins first, like SGLang | that ends first |
    The buffer prefers the stop string that ends first, because it cannot wait for a longer one. Its result does not depend on how
    the text is split. A text without the first character of any stop string costs one search per stop string.

    The worker searches text without special tokens. Some special tokens, the marks of tool calls and reasoning, stay in the
    client's text. A stop string therefore never contains a character of a mark, but it may continue after a mark. Marks before
    the stop string stay in the text. A mark within the stop string stays only if the stop string stays.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._matchers = [_StopMatcher(stop) for stop in stops if stop]
        self._include_stop = include_stop
        self._buffer = ""  # without marks
        self._after: list[str] = []  # pieces of text after `_buffer`, which came after a complete stop string
        self._num_after = 0  # characters in _after
        # Index of the character after the mark, in _buffer continued by _after; text of the mark
        self._marks: list[tuple[int, str]] = []
        self._match: tuple[int, int] | None = None  # (start, end) in _buffer of the first complete stop string

    @property
    def num_buffered_chars(self) -> int:
        return len(self._buffer) + self._num_after

    def push(self, text: str) -> str:
        """Appends text and returns the part that cannot belong to a stop string. Returns "" after a complete stop string."""
        if not self._matchers:
            return text
        if self._match is not None:
            self._after.append(text)
            self._num_after += len(text)
            return ""
        return self._release(text)

    def push_mark(self, text: str) -> str:
        """Appends the text of a mark, which is not searched, and returns it if no text before it is buffered."""
        if not self._buffer:
            return text
        self._marks.append((self.num_buffered_chars, text))
        return ""

    def finish(self, matched_stop: str) -> str:
        """Returns the buffered text, cut at the stop string that ended the request.

        Args:
            matched_stop: the stop string that the worker names; "" if no stop string ended the request. The text is cut instead
                at the first complete stop string that this buffer has found, if that one begins before matched_stop or the
                buffer does not contain matched_stop.
        """
        self._buffer = "".join([self._buffer, *self._after])
        start = self._buffer.find(matched_stop) if matched_stop else -1
        cut = (start, start + len(matched_stop)) if start >= 0 else None
        if cut is None or (self._match is not None and self._match[0] < start):
            cut = self._match
        if cut is None:
            text = self._take(len(self._buffer), len(self._buffer))
        elif self._include_stop:
            text = self._take(cut[1], cut[1] - 1)
        else:
            text = self._take(cut[0], cut[0])
        self._buffer, self._after, self._num_after, self._marks = "", [], 0, []
        return text

    def _release(self, text: str) -> str:
        before = len(self._buffer)
        self._buffer += text
        ends = [(before + end, -len(m.stop)) for m in self._matchers if (end := m.feed(text)) is not None]
        keep = max(m.matched for m in self._matchers)  # `matched` of a complete stop string is its whole length
        cut = len(self._buffer) - keep
        if ends:
            cut = min(end + minus_length for end, minus_length in ends)
            end, minus_length = min(ends)
            self._match = (end + minus_length - cut, end - cut)
        return self._take(cut, cut)

    def _take(self, end: int, last_mark: int) -> str:
        """Removes the first `end` buffered characters. Returns them together with the marks up to the index `last_mark`."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if not self._marks:
            return text
        parts: list[str] = []
        start = 0
        for index, mark in self._marks:
            if index > last_mark:
                break
            parts += (text[start:index], mark)
            start = index
        parts.append(text[start:])
        self._marks = [(index - end, mark) for index, mark in self._marks if index > end]
        return "".join(parts)


class TokenTexts:
    """The texts of single tokens as bytes, for log probabilities. Thread-safe; one instance per process."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        # A text token that is decoded before the others, because some decoders drop a space at the start of a text.
        self._anchor = tokenizer.encode_batch(["a"], False)[0][-1:]
        self._anchor_chars = len(tokenizer.decode(self._anchor, False))

    def of(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that the token adds to a text. They may be only a part of a character.

        A special token gives its name. An id outside the vocabulary gives b"".
        """
        raw = self._tokenizer.token_bytes(token_id)
        if raw is not None:
            return raw
        return self._tokenizer.decode([*self._anchor, token_id], False)[self._anchor_chars :].encode()

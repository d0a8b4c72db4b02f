"""Token ids → text of one request, a few ids at a time, each character given out exactly once.

The reference: with C = the prompt's tail and O = all output ids (special tokens and unknown ids left out of both), the text of
O is what O adds to decode(C), that is decode(C + O)[len(decode(C)):]. With an empty C it is decode(O). Leading spaces, which
Metaspace and WordPiece decoders drop at the start of a sequence only, therefore survive where there is a prompt. Two cases need
more words:

- A character whose bytes are spread over tokens belongs to the token with its last byte, even where it began in the prompt.
- A run of byte-fallback tokens (<0x80>..<0xFF>) keeps the valid characters in it and gives one U+FFFD per other byte. (The
  `tokenizers` library gives U+FFFD for every byte of a run with an error anywhere, so a later byte would take back earlier text.)

Bytes are joined by an incremental UTF-8 decoder, which holds back 3 bytes at most. Text tokens are decoded against the text
tokens just before them, as in SGLang's surrogate and read offsets. So the cost of a token does not grow with the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from services.shared.hf_tokenizer import HfTokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8  # one would do for most decoders: it only has to stand before the next
MAX_HELD_TOKENS = 4  # a character has 4 bytes at most, so 4 text tokens that still end in U+FFFD never complete one
ONE_PER_BYTE = "rootstock-replace-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(ONE_PER_BYTE, _replace_each_byte)


class IncrementalDetokenizer:
    """State of one request. One caller at a time.

    push() returns the text that is decided; finish() what was held back, as U+FFFD where it is no character.
    The sum over all calls does not depend on how the ids were split among them.
    """

    def __init__(
        self, tokenizer: HfTokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool, kept_tokens: Sequence[str] = ()
    ) -> None:
        """kept_tokens: texts of special tokens that are not skipped; what is none of the tokenizer's is not looked for."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        if self._skipped and kept_tokens:
            self._skipped -= {tokenizer.token_id(text) for text in kept_tokens}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace" if tokenizer.is_byte_level else ONE_PER_BYTE)
        self._context: list[int] = []  # text tokens already given out: they tell the decoder that it is not at the start
        self._context_chars = 0
        self._pending: list[int] = []  # text tokens after the context, not given out yet
        self.push(prompt_tail)
        self._flush_text()

    def push(self, ids: Sequence[int]) -> str:
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
                    self._set_context([self._tokenizer.anchor_id])  # the next text token is not the first one
        if self._pending:
            out.append(self._decided_text())
        return "".join(out)

    def finish(self) -> str:
        return self._flush_text() + self._utf8.decode(b"", final=True)

    def _decided_text(self) -> str:
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def _flush_text(self) -> str:
        return self._give_out(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        return self._tokenizer.decode(self._context + self._pending, False)[self._context_chars :]

    def _give_out(self, text: str) -> str:
        """The pending tokens become the context of the next ones."""
        self._set_context(self._pending[-CONTEXT_TOKENS:])
        self._pending = []
        return text

    def _set_context(self, ids: list[int]) -> None:
        self._context, self._context_chars = ids, len(self._tokenizer.decode(ids, False))

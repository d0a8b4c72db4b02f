"""Loads the tokenizer of a local Hugging Face model folder with the `tokenizers` library, without transformers and torch.

Ids equal those of transformers' AutoTokenizer for the same folder (tokenizer.json, tokenizer_config.json,
special_tokens_map.json). A loaded tokenizer is immutable and thread-safe. Encoding and decoding release the GIL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKENIZER_FILE = "tokenizer.json"
# Tokenizer files that transformers can convert to tokenizer.json.
VOCABULARIES = ("*.model", "*.tiktoken", "merges.txt", "tekken.json", "vocab.json", "vocab.txt")
DEFAULT_TEMPLATE = "default"  # name of the template for chats that do not use TOOL_TEMPLATE
TOOL_TEMPLATE = "tool_use"  # name of the template for chats with tools
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerFolderError(ValueError):
    """A file of the tokenizer is missing, not readable or broken. The message names the file."""


class HfTokenizer:
    """Converts between text and token ids."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, str], chat_templates: dict[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes | None] = {}
        # is_byte_level: each token represents bytes. _is_byte_fallback: tokens <0x00> to <0xFF> represent bytes of unknown text.
        self.is_byte_level, self._is_byte_fallback = _byte_kinds(tokenizer)
        self.special_tokens = special_tokens  # template variables, e.g. {"bos_token": "<s>"}
        self.chat_templates = chat_templates  # name → Jinja source
        # Ids that decode() omits if skip_special_tokens is set.
        self.special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self.token_id(special_tokens.get("bos_token"))
        self.eos_token_id = self.token_id(special_tokens.get("eos_token"))
        self.pad_token_id = self.token_id(special_tokens.get("pad_token"))
        # Id of a token with visible text; None if the tokenizer has no byte fallback. A decoder with byte fallback drops a space
        # at the start of a text. Callers therefore decode with this id before the other ids and remove its text.
        self.anchor_id = next(self._visible_ids(), None) if self._is_byte_fallback else None

    @property
    def inner(self) -> Tokenizer:
        """The tokenizer object of the library `tokenizers`, for reading its description. Callers must not change it."""
        return self._tokenizer

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Returns one list of ids per text, without truncation or padding. Several texts are encoded in parallel."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of the ids. Ids outside of the vocabulary are skipped."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of a token if the token represents bytes and not text.

        All tokens of a byte-level tokenizer and the byte-fallback tokens <0x80> to <0xFF> represent bytes.

        Returns:
            None for a token that represents text; b"" for an id outside of the vocabulary.
        """
        try:
            return self._bytes[token_id]
        except KeyError:
            token = self._tokenizer.id_to_token(token_id)
            found = b"" if token is None else self._bytes_of(token)
            if token is not None:  # unknown ids are not cached, because there is no limit to their number
                self._bytes[token_id] = found
            return found

    def _visible_ids(self) -> Iterator[int]:
        for token_id in range(self.vocab_size):
            is_text = token_id not in self.special_ids and self.token_bytes(token_id) is None
            if is_text and self.decode([token_id], False).isalnum():
                yield token_id

    def _bytes_of(self, token: str) -> bytes | None:
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token with a character outside the byte alphabet is plain text
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._is_byte_fallback else None
        value = int(match[1], 16) if match else 0
        return bytes([value]) if value >= 0x80 else None


def load_tokenizer(path: str | Path, chat_template: str = "") -> HfTokenizer:
    """Loads the tokenizer of a model folder.

    Args:
        chat_template: file of a Jinja template that replaces all templates of the folder; empty: the folder's templates.

    Raises:
        TokenizerFolderError: tokenizer.json is missing or broken, another tokenizer file is broken, or the template is not
            readable.
    """
    folder = Path(path)
    if not (folder / TOKENIZER_FILE).is_file():
        raise TokenizerFolderError(_missing(folder))
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerFolderError(f"{folder / TOKENIZER_FILE}: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    declared = dict(config)
    if "added_tokens_decoder" not in config:
        declared |= _read_json(folder / "special_tokens_map.json")
    special_tokens = _special_tokens(declared)
    _add_missing_tokens(tokenizer, declared, special_tokens)
    templates = {DEFAULT_TEMPLATE: _template_file(Path(chat_template))} if chat_template else _chat_templates(folder, config)
    return HfTokenizer(tokenizer, special_tokens, templates)


def vocabulary_files(folder: str | Path) -> list[str]:
    """Returns the names of the folder's tokenizer files that transformers can convert to tokenizer.json."""
    return sorted({path.name for pattern in VOCABULARIES for path in Path(folder).glob(pattern)})


def _missing(folder: Path) -> str:
    files = vocabulary_files(folder)
    if not files:
        return f"{folder} has no {TOKENIZER_FILE}. Copy the tokenizer files of the model's publisher into it."
    return (
        f"{folder} has {', '.join(files)} but no {TOKENIZER_FILE}. Convert them on a machine with transformers:"
        f" `python -m rootstock_llm.services.worker.text.convert_tokenizer {folder}`."
    )


def has_chat_template(path: str | Path) -> bool:
    """Returns whether a model folder has a chat template. Raises TokenizerFolderError if its tokenizer_config.json is broken."""
    folder = Path(path)
    return bool(_chat_templates(folder, _read_json(folder / "tokenizer_config.json")))


def _template_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerFolderError(f"--chat-template {path} is not readable: {error.strerror}.") from error
    except ValueError as error:
        raise TokenizerFolderError(f"--chat-template {path} is not UTF-8 text. Give a file with a Jinja template.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerFolderError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerFolderError(f"{path}: not a JSON object")
    return value


def _content(token: Any) -> str | None:
    """Returns the text of a token that is either a string or a serialized AddedToken."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a tokenizer config by name.

    These are the tokens in SPECIAL_TOKEN_NAMES, other strings whose name ends with _token, and the entries of the object
    extra_special_tokens.
    """
    others = [k for k, v in config.items() if k.endswith("_token") and k not in SPECIAL_TOKEN_NAMES and isinstance(v, str)]
    tokens = {name: _content(config.get(name)) for name in (*SPECIAL_TOKEN_NAMES, *others)}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        tokens |= {name: _content(value) for name, value in extra.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _extra_tokens(config: dict[str, Any]) -> list[AddedToken]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [_special(item) for item in extra] if isinstance(extra, list) else []


def _special(token: Any) -> AddedToken:
    """Makes a special token from a string or from a serialized AddedToken."""
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    return AddedToken(**{key: value for key, value in token.items() if key not in ("__type", "special")}, special=True)


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Adds the declared tokens that tokenizer.json lacks, and marks special tokens as special.

    Tokens are added in the order in which transformers adds them, so that new tokens get the same ids. A token in
    SPECIAL_TOKEN_NAMES gets the flags of its entry in added_tokens_decoder, or without added_tokens_decoder, in tokenizer.json.
    """
    present = tokenizer.get_added_tokens_decoder()
    by_id = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    declared = [AddedToken(**{key: value for key, value in token.items() if key != "__type"}) for _, token in by_id]
    table = {token.content: token for token in (declared if "added_tokens_decoder" in config else present.values())}
    named = [_named_token(name, token, config, table) for name, token in special_tokens.items()]
    seen = {repr(token) for token in present.values()}
    tokenizer.add_tokens([token for token in declared if repr(token) not in seen])
    tokenizer.add_special_tokens([*named, *_extra_tokens(config)])


def _named_token(name: str, token: str, config: dict[str, Any], table: dict[str, AddedToken]) -> AddedToken:
    if name in SPECIAL_TOKEN_NAMES and token in table:
        return table[token]
    return _special(config.get(name, token))


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name: those of template files, or if there are no such files, `chat_template` of the config.

    `chat_template` is a string or a list of {name, template}.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT_TEMPLATE] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        return {DEFAULT_TEMPLATE: declared}
    return {item["name"]: item["template"] for item in declared or []}


def _byte_kinds(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Returns whether the tokenizer is byte-level and whether it has byte fallback.

    Decodes samples, because the type of a decoder can be hidden in a sequence of decoders.
    """
    decoder = tokenizer.decoder
    if decoder is None:
        return False, False
    is_byte_level = decoder.decode(["Ġa", "Ġ", "ä½", "ł"]) == " a 你"
    return is_byte_level, not is_byte_level and decoder.decode(["a", "<0xE4>", "<0xBD>", "<0xA0>"]) == "a你"


def _byte_of_char() -> dict[str, int]:
    """Returns the inverse of GPT-2's map from the 256 bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()

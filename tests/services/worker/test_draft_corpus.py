"""Tests of the operator's text file for n-gram drafts: the texts read from it, and the reasons of a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.hf_tokenizer import load_tokenizer
from rootstock_llm.services.worker import draft_corpus as module
from rootstock_llm.services.worker.draft_corpus import PIECE_CHARS, draft_corpus
from rootstock_llm.services.worker.settings import WorkerSettings

MODEL = Path(__file__).resolve().parents[3] / "models/demo"


def letters(texts: Sequence[str], special: bool) -> list[list[int]]:
    """Encodes each character as one token."""
    assert not special, "texts get no special tokens"
    return [[ord(char) for char in text] for text in texts]


def corpus_of(path: Path, max_tokens: int = 1000, algorithm: str = "ngram") -> str | None:
    settings = WorkerSettings(
        speculative_algorithm=algorithm,
        speculative_ngram_external_corpus_path=str(path),
        speculative_ngram_external_corpus_max_tokens=max_tokens,
    )
    read = draft_corpus(settings, lambda: letters)
    return None if read is None else "".join("|" if token < 0 else chr(token) for token in read.tolist())


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def written(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return written


def test_each_jsonl_line_is_a_text_and_a_plain_file_is_one_text(write: Callable[[str, bytes], Path]) -> None:
    lines = [json.dumps("one\ntwo"), "", json.dumps({"text": "größer", "id": 4}), json.dumps(""), json.dumps("end")]
    assert corpus_of(write("texts.jsonl", "\r\n".join(lines).encode())) == "one\ntwo|größer|end"
    assert corpus_of(write("texts.txt", b'"one"\n"two"')) == '"one"\n"two"'


def test_long_texts_are_encoded_in_pieces_that_end_at_line_ends(
    write: Callable[[str, bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(module, "BATCH_PIECES", 2)
    text = "ab\n" * PIECE_CHARS + "c" * 2 * PIECE_CHARS
    settings = WorkerSettings(
        speculative_algorithm="ngram", speculative_ngram_external_corpus_path=str(write("long", text.encode()))
    )

    def encode(texts: Sequence[str], special: bool) -> list[list[int]]:
        assert len(texts) <= 2
        seen.extend(texts)
        return letters(texts, special)

    read = draft_corpus(settings, lambda: encode)
    assert read is not None and "".join(map(chr, read.tolist())) == text == "".join(seen)
    assert max(map(len, seen)) <= PIECE_CHARS and sum(piece.endswith("\n") for piece in seen) >= 3


def test_corpus_has_the_token_ids_of_the_models_tokenizer(write: Callable[[str, bytes], Path]) -> None:
    tokenizer = load_tokenizer(MODEL)
    path = write("texts.jsonl", json.dumps("count to three").encode())
    settings = WorkerSettings(speculative_algorithm="ngram", speculative_ngram_external_corpus_path=str(path))
    read = draft_corpus(settings, lambda: tokenizer.encode_batch)
    assert read is not None and read.tolist() == tokenizer.encode_batch(["count to three"], False)[0]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"caf\xe9", "is not UTF-8 at byte 3"),
        ("a.jsonl", b'"one"\n{"text": 4}', "line 2 of .* must be a string, or an object"),
        ("a.jsonl", b'"one"\nplain', "line 2 of .* is not JSON"),
        ("a.jsonl", b'\n""\n', "has no text"),
        ("a.txt", b"x" * 1001, "more than 1000 tokens"),
    ],
    ids=["not UTF-8", "record without a text", "not JSON", "no text", "too many tokens"],
)
def test_invalid_corpus_is_refused_with_a_reason(
    write: Callable[[str, bytes], Path], name: str, content: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^--speculative-ngram-external-corpus-path: .*{reason}"):
        corpus_of(write(name, content))


def test_missing_or_too_large_or_unused_corpus_is_refused(
    write: Callable[[str, bytes], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="does not exist or is not a file"):
            corpus_of(path)
    monkeypatch.setattr(limits, "MAX_CORPUS_BYTES", 1 << 20)
    assert corpus_of(write("a.txt", b"y" * (1 << 20)), 1 << 20) == "y" * (1 << 20)
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        corpus_of(write("a.txt", b"y" * ((1 << 20) + 1)), 1 << 21)
    with pytest.raises(ValueError, match="has no effect with --speculative-algorithm eagle3"):
        corpus_of(write("a.txt", b"y"), algorithm="eagle3")
    assert draft_corpus(WorkerSettings(), lambda: letters) is None

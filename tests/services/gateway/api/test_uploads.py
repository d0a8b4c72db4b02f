"""Tests of file uploads: forms in pieces, invalid forms, and uploads over a limit, which leave no record."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from rootstock_llm.services.gateway.api.batches.form_reader import (
    BadForm,
    Event,
    FormReader,
    PartBegins,
    PartContent,
    PartEnds,
    boundary_of,
)
from rootstock_llm.services.shared import limits
from tests.services.gateway.system import System, wait_until
from tests.services.redis_server import RedisServer

MAX_BYTES = 2 << 20
TYPE = "multipart/form-data; boundary=x"
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    b"one\r\n--\r\n--y\r\n\r\n--x--\r\n"
)


@pytest.fixture(scope="module")
def system(store: RedisServer) -> Iterator[System]:
    with System(state_redis_url=store.url, max_file_bytes=MAX_BYTES, file_bytes_per_key=3 << 20, state_patience_s=0.1) as started:
        yield started


@pytest.fixture
def client(system: System) -> OpenAI:
    return system.openai()


def read(form: bytes, size: int) -> list[Event]:
    """Feeds the form in pieces of `size` bytes. Returns the events, with the content of each part joined into one event."""
    reader, found = FormReader(b"x"), list[Event]()
    for at in range(0, len(form), size):
        for event in reader.feed(form[at : at + size]):
            if isinstance(event, PartContent) and isinstance(found[-1], PartContent):
                event = PartContent(found.pop().content + event.content)  # type: ignore[union-attr]
            found.append(event)
    assert reader.is_complete
    return found


def test_form_reader_returns_the_same_events_for_any_division_into_pieces() -> None:
    all_events = [
        *(PartBegins("purpose", None), PartContent(b"batch"), PartEnds()),
        *(PartBegins("file", "a.jsonl"), PartContent(b"one\r\n--\r\n--y\r\n"), PartEnds()),
    ]
    assert all(read(FORM, size) == all_events for size in range(1, len(FORM) + 1))
    bare = FORM.replace(b'"purpose"', b"purpose").replace(b'name="file"; filename="a.jsonl"', b"Name=file;filename=a.jsonl")
    assert read(bare.replace(b"a.jsonl", b"a.jsonl; filename*=utf-8''b"), 7) == all_events, (
        "the filename* parameter that .NET adds is ignored"
    )
    assert read(b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n--x--', 1) == [PartBegins("a", None), PartEnds()]


def head(size: int) -> bytes:
    begin = b'--x\r\ncontent-disposition: form-data; name="a'
    return begin + b"a" * (size - len(begin) + 2) + b'"\r\n\r\n\r\n--x--'


BAD_FORMS = {
    "preamble": b"before" + FORM,
    "text after a boundary": FORM.replace(b"--x\r\nc", b"--x c"),
    "part without a name": FORM.replace(b"form-data", b"attachment"),
    "head too large": head(limits.MAX_FORM_HEAD_BYTES + 1),
    "too many parts": b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * (limits.MAX_FORM_PARTS + 1),
    "name not UTF-8": FORM.replace(b"purpose", b"\xff"),
}
BOUNDARIES = {  # by Content-Type: the boundary, or None if the type is refused
    "multipart/form-data; boundary=x": b"x",
    'Multipart/Form-Data; charset=utf-8; Boundary="a b"': b"a b",
    "application/json": None,
    "multipart/form-data": None,
    "multipart/form-data; boundary=" + "x" * 71: None,
}


def test_form_reader_refuses_bad_forms() -> None:
    for what, form in BAD_FORMS.items():
        with pytest.raises(BadForm):
            list(FormReader(b"x").feed(form))
            pytest.fail(what)
    assert list(FormReader(b"x").feed(head(limits.MAX_FORM_HEAD_BYTES)))
    assert {kind: boundary_of(kind) for kind in BOUNDARIES} == BOUNDARIES


def test_file_content_is_returned_unchanged(client: OpenAI) -> None:
    content = bytes(range(256)) * 8000  # several chunks; the last one is not full
    name = "é" * (limits.MAX_FILE_NAME_CHARS + 1)
    file = client.files.create(file=(name, content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200})
    assert len(content) > limits.FILE_CHUNK_BYTES and client.files.content(file.id).content == content
    assert (file.bytes, file.filename, file.purpose) == (len(content), name[:-1], "batch")
    assert file.expires_at == file.created_at + 7200 and client.files.retrieve(file.id) == file
    assert client.files.delete(file.id).deleted


def refusals(system: System, body: bytes, content_type: str = TYPE) -> tuple[int, str]:
    answer = system.post("/v1/files", body, headers={"content-type": content_type})
    return answer.status_code, answer.json()["error"]["code"]


def test_refused_upload_leaves_no_records(system: System, store: RedisServer, client: OpenAI) -> None:
    def upload(size: int, **fields: str) -> None:
        client.files.create(file=("a", b"x" * size), **{"purpose": "batch", **fields})  # type: ignore[arg-type]

    upload(MAX_BYTES)
    before = sorted(store.client.keys("*"))
    with pytest.raises(openai.APIStatusError, match="larger than") as large:
        upload(MAX_BYTES + 1)
    with pytest.raises(openai.RateLimitError):
        upload(MAX_BYTES)
    assert large.value.status_code == 413
    for fields in ({"purpose": "fine-tune"}, {"expires_after": {"anchor": "created_at", "seconds": 9}}):
        with pytest.raises(openai.BadRequestError):
            upload(1 << 10, **fields)  # type: ignore[arg-type]
    endless = FORM + b"x" * (MAX_BYTES + (2 << 20))
    assert refusals(system, endless) == (413, "file_too_large")
    assert refusals(system, FORM, "application/json") == (400, "invalid_form")
    assert refusals(system, FORM[:-6]) == (400, "invalid_form")
    assert refusals(system, FORM.replace(b'"file"', b'"other"')) == (400, "missing_required_parameter")
    assert refusals(system, FORM.replace(b'"purpose"', b'"file"; filename="b"')) == (400, "invalid_form")
    assert sorted(store.client.keys("*")) == before
    assert system.metric("rootstock_gateway_body_bytes", pool="large") == 0


def test_aborted_upload_leaves_no_records(system: System, store: RedisServer) -> None:
    before = sorted(store.client.keys("*"))
    with socket.create_connection(("127.0.0.1", system.port)) as connection:
        lines = (b"POST /v1/files HTTP/1.1", b"host: a", b"content-type: " + TYPE.encode(), b"content-length: 1500000")
        connection.sendall(b"\r\n".join((*lines, b"", FORM[: FORM.index(b"one")], b"x" * (limits.FILE_CHUNK_BYTES // 2))))
        wait_until(lambda: system.metric("rootstock_gateway_body_bytes", pool="large") > 0, "the begin of the upload")
    wait_until(lambda: system.metric("rootstock_gateway_body_bytes", pool="large") == 0, "the end of the upload")
    assert sorted(store.client.keys("*")) == before


def test_files_and_batches_are_refused_without_a_store(shared: System) -> None:
    answer = shared.post("/v1/files", FORM, headers={"content-type": TYPE})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_store") and "batches" in answer.text
    assert shared.get("/v1/batches").json()["error"]["code"] == "no_store"


def test_file_and_batch_requests_fail_while_the_store_is_unreachable(system: System, store: RedisServer, client: OpenAI) -> None:
    store.kill()
    for ask in (client.files.list, client.batches.list, lambda: client.batches.cancel("batch_a")):
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as away:
            ask()
        assert away.value.status_code == 503
    store.start()
    assert client.files.list()

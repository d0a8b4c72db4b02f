"""Sends each example of /openapi.json to a running system.

The ids in an example are replaced by ids of objects that earlier examples have created.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.system import System

# Operation → permitted refusal. A batch or response may end before it is cancelled, and a file may be in use.
ELSE_THAN_200 = {
    "post /v1/batches/{batch_id}/cancel": (409, "batch_not_cancellable"),
    "post /v1/responses/{response_id}/cancel": (400, "unsupported_operation"),
    "delete /v1/files/{file_id}": (409, "file_in_use"),
}
MAKES = {
    "/v1/responses": "response_id",
    "/v1/conversations": "conversation_id",
    "/v1/files": "file_id",
    "/v1/batches": "batch_id",
}
IN_BODIES = {"input_file_id": "file_id"}


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=system.url, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    return dict(client.get("/openapi.json").json())


def in_order(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns (method, path, operation) of all operations.

    First come the operations without a path parameter, which create the objects. GET follows, then POST and PUT, last DELETE.
    """
    found = [
        (method, path, item[method])
        for path, item in document["paths"].items()
        for method in ("get", "post", "put", "delete")
        if method in item
    ]
    rank = {"get": 1, "post": 2, "put": 2}
    removed = sorted((each for each in found if each[0] == "delete"), key=lambda each: -len(each[1]))  # items first
    others = [each for each in found if each[0] != "delete"]
    return [*sorted(others, key=lambda each: rank[each[0]] if "{" in each[1] else 0), *removed]


def send(client: httpx.Client, method: str, path: str, operation: dict[str, Any], ids: dict[str, str]) -> httpx.Response:
    examples = {each["name"]: each["example"] for each in operation["parameters"] if each["in"] == "path"}
    place = re.sub(r"\{(\w+)\}", lambda match: ids.get(match[1], examples.get(match[1], "")), path)
    ((media, content),) = operation.get("requestBody", {"content": {"": {}}})["content"].items()
    body = {name: ids[IN_BODIES[name]] if name in IN_BODIES else value for name, value in content.get("example", {}).items()}
    if media == "multipart/form-data":
        return client.post(place, data={"purpose": body["purpose"]}, files={"file": ("requests.jsonl", body["file"])})
    return client.request(method, place, json=body or None)


def test_openapi_examples_are_served(client: httpx.Client, document: dict[str, Any]) -> None:
    ids: dict[str, str] = {}
    wrong = []
    for method, path, operation in in_order(document):
        if "200" not in operation["responses"]:
            continue  # an operation that this gateway always refuses
        answer = send(client, method, path, operation, ids)
        if method == "post" and path in MAKES:
            ids[MAKES[path]] = answer.json()["id"]
        if path == "/v1/conversations/{conversation_id}/items" and method == "get":
            ids["item_id"] = answer.json()["data"][0]["id"]
        status, code = ELSE_THAN_200.get(f"{method} {path}", (200, ""))
        is_else = answer.status_code == status != 200 and answer.json()["error"]["code"] == code
        if answer.status_code != 200 and not is_else:
            wrong.append(f"{method} {path}: {answer.status_code} {answer.text[:200]}")
    assert not wrong, "\n".join(wrong)
    assert set(MAKES.values()) | {"item_id"} == ids.keys()


def test_chat_example_gets_the_right_answer(client: httpx.Client, document: dict[str, Any]) -> None:
    example = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["example"]
    answer = client.post("/v1/chat/completions", content=json.dumps(example)).json()
    assert "42" in answer["choices"][0]["message"]["content"]

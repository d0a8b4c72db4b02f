"""One chat question over the public API, its answer printed as it streams. Standard library only, as a client would."""

from __future__ import annotations

import http.client
import json

from services.local.ports import HOST

QUESTION = "What is 17 + 25?"


def ask(port: int, model: str, question: str = QUESTION) -> str:
    """Prints the answer piece by piece and returns it. Raises OSError or ValueError if there is none."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 64,
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"the gateway answered {response.status}: {response.read().decode(errors='replace')}")
    answer = ""
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(event["error"]["message"])
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            print(piece, end="", flush=True)
            answer += piece
    print()
    connection.close()
    return answer

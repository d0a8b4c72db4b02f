"""Asks one question over the public API and prints the streamed answer. Imports the standard library only, as a client would."""

from __future__ import annotations

import http.client
import json

from services.local.ports import HOST

QUESTION = "What is 17 + 25?"
PROMPT = "The capital of France is"  # for a model without a chat template


def ask(port: int, model: str, question: str = QUESTION, chats: bool = True) -> str:
    """Prints the answer piece by piece and returns it.

    Args:
        chats: whether the model has a chat template; if not, the question is the prompt of a completion.

    Raises:
        OSError, ValueError: there is no answer.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    asked = {"messages": [{"role": "user", "content": question}]} if chats else {"prompt": question}
    body: dict[str, object] = {"model": model, **asked, "stream": True, "temperature": 0, "max_tokens": 64}
    path = "/v1/chat/completions" if chats else "/v1/completions"
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
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
            piece = (choice["delta"].get("content") or "") if chats else choice["text"]
            print(piece, end="", flush=True)
            answer += piece
    print()
    connection.close()
    return answer

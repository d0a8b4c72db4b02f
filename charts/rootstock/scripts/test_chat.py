"""python -c … URL MODEL …: asks each MODEL one question through the gateway at URL; exits with 1 where there is no answer.

A model without a chat template is asked for a completion, one that gives vectors for one. While no worker has room (503) it asks again, for ten minutes.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

PATIENCE_S = 600.0
CONTEXT = ssl.create_default_context()  # within the cluster the certificate's name is another one
CONTEXT.check_hostname, CONTEXT.verify_mode = False, ssl.CERT_NONE
INSIDE = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=CONTEXT))  # no proxy
KEY = os.environ.get("API_KEY", "")


def post(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {KEY}"} if KEY else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with INSIDE.open(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def ask(url: str, model: str) -> str:
    """What the answer has, empty where that is nothing."""
    common = {"model": model, "max_tokens": 8, "temperature": 0}
    ways = {
        "chat/completions": {**common, "messages": [{"role": "user", "content": "Count from 1 to 5."}]},
        "completions": {**common, "prompt": "1, 2, 3,"},
        "embeddings": {"model": model, "input": "1, 2, 3,"},
    }
    for way, body in ways.items():
        try:
            answer = post(f"{url}/v1/{way}", body)
        except urllib.error.HTTPError as error:
            if error.code != 400 or way == "embeddings":
                raise
            print(f"{model}: {way}: {error.read().decode(errors='replace')}", flush=True)
            continue
        if way == "embeddings":
            count, unit = len(answer["data"][0]["embedding"]), "values of a vector"
        else:
            count, unit = answer["usage"]["completion_tokens"], "tokens"
        break
    return f"{count} {unit}" if count else ""


def wait_for_answer(url: str, model: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            said = ask(url, model)
            break
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code != 503
            detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            print(f"{model}: {error} {detail}", flush=True)
            if refused or time.monotonic() > deadline:
                sys.exit(1)
            time.sleep(5)
    if not said:
        sys.exit(f"{model}: an empty answer")
    print(f"{model}: {said}", flush=True)


for name in sys.argv[2:]:
    wait_for_answer(sys.argv[1], name)

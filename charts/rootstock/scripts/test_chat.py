"""python -c … URL MODEL …: asks each MODEL one question through the gateway at URL; exits with 1 where there is no answer.

A model without a chat template is asked for a completion. While no worker has room (503) it asks again, for ten minutes.
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


def ask(url: str, model: str) -> int:
    """Tokens of the answer."""
    common = {"model": model, "max_tokens": 8, "temperature": 0}
    try:
        answer = post(f"{url}/v1/chat/completions", {**common, "messages": [{"role": "user", "content": "Count from 1 to 5."}]})
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        answer = post(f"{url}/v1/completions", {**common, "prompt": "1, 2, 3,"})
    return answer["usage"]["completion_tokens"]


def wait_for_answer(url: str, model: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            tokens = ask(url, model)
            break
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code != 503
            detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            print(f"{model}: {error} {detail}", flush=True)
            if refused or time.monotonic() > deadline:
                sys.exit(1)
            time.sleep(5)
    if not tokens:
        sys.exit(f"{model}: an empty answer")
    print(f"{model}: {tokens} tokens", flush=True)


for name in sys.argv[2:]:
    wait_for_answer(sys.argv[1], name)

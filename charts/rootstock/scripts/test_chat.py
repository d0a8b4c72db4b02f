"""python -c … URL MODEL …: sends one request to each MODEL through the gateway at URL, and exits with 1 if a model fails.

A model without a chat template gets a completion request, and a model for embeddings gets an embedding request. If the gateway
responds with 503 or the connection fails, the script sends the request again, for up to ten minutes.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

PATIENCE_S = 600.0  # limit of the retries, and of one request
# Certificates are not verified: the gateway's certificate has a name for clients outside of the cluster, and this URL differs.
CONTEXT = ssl.create_default_context()
CONTEXT.check_hostname, CONTEXT.verify_mode = False, ssl.CERT_NONE
# Calls the gateway directly: a proxy from the pod's variables may not reach addresses inside the cluster.
INSIDE = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=CONTEXT))
KEY = os.environ.get("API_KEY", "")


def post(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {KEY}"} if KEY else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with INSIDE.open(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def ask(url: str, model: str) -> str:
    """Returns the size of the response, such as "8 tokens"; "" if the response is empty."""
    common = {"model": model, "max_tokens": 8, "temperature": 0}
    requests = {
        "chat/completions": {**common, "messages": [{"role": "user", "content": "Count from 1 to 5."}]},
        "completions": {**common, "prompt": "1, 2, 3,"},
        "embeddings": {"model": model, "input": "1, 2, 3,"},
    }
    for path, body in requests.items():
        try:
            response = post(f"{url}/v1/{path}", body)
        except urllib.error.HTTPError as error:
            if error.code != 400 or path == "embeddings":
                raise
            print(f"{model}: {path}: {error.read().decode(errors='replace')}", flush=True)
            continue
        if path == "embeddings":
            count, unit = len(response["data"][0]["embedding"]), "values of a vector"
        else:
            count, unit = response["usage"]["completion_tokens"], "tokens"
        break
    return f"{count} {unit}" if count else ""


def wait_for_answer(url: str, model: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            size = ask(url, model)
            break
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code != 503
            detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            print(f"{model}: {error} {detail}", flush=True)
            if refused or time.monotonic() > deadline:
                sys.exit(1)
            time.sleep(5)
    if not size:
        sys.exit(f"{model}: the response is empty")
    print(f"{model}: {size}", flush=True)


for name in sys.argv[2:]:
    wait_for_answer(sys.argv[1], name)

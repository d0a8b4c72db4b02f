"""python -c … URL SERVICE …: exits with 0 when the gateway at URL is connected to every SERVICE, or with 1 after five minutes."""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request

PATIENCE_S = 300.0
CONTEXT = ssl.create_default_context()  # the gateway's certificate has a name for clients outside of the cluster
CONTEXT.check_hostname, CONTEXT.verify_mode = False, ssl.CERT_NONE
INSIDE = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=CONTEXT))  # no proxy


def missing(url: str) -> set[str]:
    try:
        with INSIDE.open(f"{url}/readiness", timeout=10) as answer:
            return set(json.load(answer)["missing"])
    except urllib.error.HTTPError as error:
        return set(json.load(error)["missing"])
    except OSError as error:
        return {*wanted, f"the gateway itself: {error}"}


url, wanted = sys.argv[1], set(sys.argv[2:])
deadline = time.monotonic() + PATIENCE_S
while not_there := {one for one in missing(url) if one in wanted or one == "stopping" or " " in one}:
    print(f"missing: {', '.join(sorted(not_there))}", flush=True)
    if time.monotonic() > deadline:
        sys.exit(1)
    time.sleep(2)
print(f"connected: {', '.join(sorted(wanted))}")

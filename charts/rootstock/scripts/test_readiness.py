"""python -c … URL SERVICE …: waits until the gateway at URL is connected to every SERVICE. Exits with 1 after five minutes."""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request

PATIENCE_S = 300.0  # limit of the wait, equal to the default timeout of `helm test`
# Certificates are not verified: the gateway's certificate has a name for clients outside of the cluster, and this URL differs.
CONTEXT = ssl.create_default_context()
CONTEXT.check_hostname, CONTEXT.verify_mode = False, ssl.CERT_NONE
# Calls the gateway directly: a proxy from the pod's variables may not reach addresses inside the cluster.
INSIDE = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=CONTEXT))


def missing(url: str, wanted: set[str]) -> set[str]:
    """Returns the services that the gateway reports as missing.

    "stopping" is among them if the gateway is stopping. If the gateway does not respond, returns `wanted` and the error.
    """
    try:
        with INSIDE.open(f"{url}/readiness", timeout=10) as answer:
            return set(json.load(answer)["missing"])
    except urllib.error.HTTPError as error:
        return set(json.load(error)["missing"])
    except OSError as error:
        return {*wanted, f"the gateway: {error}"}


url, wanted = sys.argv[1], set(sys.argv[2:])
deadline = time.monotonic() + PATIENCE_S
# Ignores missing services that are not on the command line. A text with a space is the error of a failed request.
while not_there := {one for one in missing(url, wanted) if one in wanted or one == "stopping" or " " in one}:
    print(f"missing: {', '.join(sorted(not_there))}", flush=True)
    if time.monotonic() > deadline:
        sys.exit(1)
    time.sleep(2)
print(f"connected: {', '.join(sorted(wanted))}")

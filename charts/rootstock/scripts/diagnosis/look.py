"""Collects the state of a release from the API server, the gateway, Prometheus, Redis and the resolver, with short timeouts.

It changes nothing except one key in each Redis server, which it deletes again; the key expires after a minute. A failed call is
recorded as a fact.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from .install import UNASKED, UNRESOLVED, Answer, Facts, Install, Object, RedisState, logs_wanted, pods_of
from .redis_probe import probe

TIMEOUT_S = 8.0  # time limit of an HTTP request
NAMES_S = 15.0  # time limit for resolving all names
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Text of the round trip through each model's tokenizer and detokenizer.
SAMPLE = "Zwölf Boxkämpfer jagen Viktor; 東京 2026 🚀 def f(x): return x**2"
# Does not verify certificates: the gateway's certificate has a name for clients outside of the cluster.
UNVERIFIED = ssl.create_default_context()
UNVERIFIED.check_hostname, UNVERIFIED.verify_mode = False, ssl.CERT_NONE
# Keys of KEDA's Secret whose values are sent to Prometheus.
SENT_KEYS = ("bearerToken", "username", "password", "customAuthHeader", "customAuthValue")
LISTS = {
    "pods": "api/v1",
    "services": "api/v1",
    "events": "api/v1",
    "persistentvolumeclaims": "api/v1",
    "replicasets": "apis/apps/v1",
    "statefulsets": "apis/apps/v1",
    "networkpolicies": "apis/networking.k8s.io/v1",
    "horizontalpodautoscalers": "apis/autoscaling/v2",
    "scaledobjects": "apis/keda.sh/v1alpha1",
}


def get(url: str, headers: Mapping[str, str], context: ssl.SSLContext | None, body: object = None) -> Answer:
    """Sends a request. Hosts inside the cluster are called without a proxy, because urllib ignores networks in NO_PROXY."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), dict(headers))
    proxies = urllib.request.ProxyHandler({} if _is_inside(_host(url)) else None)
    opener = urllib.request.build_opener(proxies, urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return Answer(answer.status, _read(answer.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, _read(error.read()))
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Answer(error=str(getattr(error, "reason", error)) or repr(error))


def _is_inside(host: str) -> bool:
    """Returns whether the host is an address or the name of a Service."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return "." not in host or "svc" in host.split(".")


def _read(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


class ApiServer:
    """The API server, called with the pod's account, or at $DIAGNOSIS_API without an account (`kubectl proxy`)."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._context: ssl.SSLContext | None = None
        self._headers: dict[str, str] = {}
        self._url = environ.get("DIAGNOSIS_API", "")
        if self._url:
            return
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._url = f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""
        if (ACCOUNT / "token").is_file():
            self._headers["Authorization"] = f"Bearer {(ACCOUNT / 'token').read_text().strip()}"
            self._context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))

    def get(self, path: str) -> Answer:
        if not self._url:
            return Answer(error="KUBERNETES_SERVICE_HOST is not set, so this process is not in a pod of a cluster")
        return get(f"{self._url}/{path}", self._headers, self._context)


def look(install: Install, gateway: str, environ: Mapping[str, str]) -> Facts:
    """Collects all facts.

    Args:
        gateway: The gateway's URL.
        environ: Variables. DIAGNOSIS_SECRETS is the folder with the mounted Secrets; ROOTSTOCK_REDIS_URL, ROOTSTOCK_STATE_REDIS_URL
            and API_KEY are optional.
    """
    api = ApiServer(environ)
    lists = {plural: group for plural, group in LISTS.items() if plural != "scaledobjects" or _by_keda(install)}
    objects = {plural: api.get(f"{group}/namespaces/{install.namespace}/{plural}") for plural, group in lists.items()}
    objects = {plural: _of_release(install, answer) for plural, answer in objects.items()}
    mounted = secrets_in(Path(environ.get("DIAGNOSIS_SECRETS", "/secrets")))
    names = resolved([*install.services, *_host_of(install.prometheus)])
    key = {"Authorization": f"Bearer {environ['API_KEY']}"} if environ.get("API_KEY") else {}

    def of_gateway(path: str, body: object = None) -> Answer:
        headers = {**key, "Content-Type": "application/json"}
        return get(f"{gateway}{path}", headers, UNVERIFIED if gateway.startswith("https") else None, body)

    readiness = of_gateway("/readiness") if not names.get(_host(gateway)) else Answer(error=UNRESOLVED)
    info = of_gateway("/server_info") if readiness.status else readiness
    facts = Facts(
        objects=objects,
        groups=api.get("apis"),
        external=_external(install, api),
        names=names,
        secrets=mounted,
        redis=redis_of(install, environ, names),
        readiness=readiness,
        info=info,
        texts={} if not info.good else _texts(info, of_gateway),
        series=series_of(install, environ, names),
    )
    logs = {
        f"{pod}/{container}": _text(api.get(_log_path(install, pod, container, before)))
        for pod, container, before in logs_wanted(pods_of(facts))
    }
    return Facts(**{**vars(facts), "logs": logs})


def _by_keda(install: Install) -> bool:
    return bool(install.scaled["engine"] == "keda" and install.scaled["names"])


def _external(install: Install, api: ApiServer) -> Answer:
    """Queries the external metric that the HPA of the first scaled model uses."""
    if install.scaled["engine"] != "hpa" or not install.scaled["selector"]:
        return UNASKED
    query = urllib.parse.urlencode({"labelSelector": install.scaled["selector"]})
    return api.get(f"apis/external.metrics.k8s.io/v1beta1/namespaces/{install.namespace}/{install.scaled['metric']}?{query}")


def _of_release(install: Install, answer: Answer) -> Answer:
    """Removes objects of other releases. Objects without the label of a release stay."""
    if not answer.good or not isinstance(answer.body, dict):
        return answer
    items = [each for each in answer.body.get("items") or () if _is_ours(install, each)]
    return Answer(answer.status, {**answer.body, "items": items})


def _is_ours(install: Install, each: Object) -> bool:
    release = (each["metadata"].get("labels") or {}).get("app.kubernetes.io/instance", "")
    return release in ("", install.instance)


def _log_path(install: Install, pod: str, container: str, before: bool) -> str:
    query = urllib.parse.urlencode({"container": container, "tailLines": 30, **({"previous": "true"} if before else {})})
    return f"api/v1/namespaces/{install.namespace}/pods/{pod}/log?{query}"


def _text(answer: Answer) -> str:
    if not answer.good:
        return ""
    return answer.body if isinstance(answer.body, str) else json.dumps(answer.body)  # a log of one JSON line was parsed by _read()


def secrets_in(folder: Path) -> dict[str, frozenset[str]]:
    if not folder.is_dir():
        return {}
    return {
        each.name: frozenset(key.name for key in each.iterdir() if not key.name.startswith("..")) for each in folder.iterdir()
    }


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or ""


def _host_of(url: str) -> list[str]:
    return [_host(url)] if url else []


def resolved(hosts: list[str]) -> dict[str, str]:
    """Returns the resolver's error per host; "" if the host resolves. Resolves in parallel, because a resolver's timeout is long."""
    found: dict[str, str] = {}

    def one(host: str) -> None:
        try:
            socket.getaddrinfo(host, None)
            found[host] = ""
        except OSError as error:
            found[host] = error.strerror or str(error)

    threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in dict.fromkeys(hosts)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + NAMES_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return {host: found.get(host, f"no response of the resolver within {NAMES_S:.0f} s") for host in dict.fromkeys(hosts)}


def redis_of(install: Install, environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, RedisState]:
    variables = {"index": "ROOTSTOCK_REDIS_URL", "state": "ROOTSTOCK_STATE_REDIS_URL"}
    urls = {what: environ.get(variables[what], "") for what in install.redis}
    return {
        what: RedisState(_host(url), UNRESOLVED) if names.get(_host(url)) else probe(url) for what, url in urls.items() if url
    }


def series_of(install: Install, environ: Mapping[str, str], names: Mapping[str, str]) -> Answer:
    """Queries Prometheus for the number of running targets per component."""
    if not install.scrapes:
        return UNASKED
    if names.get(_host(install.prometheus)):
        return Answer(error=UNRESOLVED)
    query = f'sum by (component) (up{{namespace="{install.namespace}",component=~"rootstock-.+"}})'
    url = f"{install.prometheus.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    folder = Path(environ.get("DIAGNOSIS_SECRETS", "/secrets")) / environ.get("PROMETHEUS_SECRET", "")
    answer = get(url, prometheus_headers(folder, install.headers), UNVERIFIED if url.startswith("https") else None)
    if answer.good and not (isinstance(answer.body, dict) and answer.body.get("status") == "success"):
        return Answer(error=f"the response is not one of Prometheus: {str(answer.body)[:100]!r}")
    return answer


def prometheus_headers(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers that KEDA makes from the Secret's keys. Client certificates are not used."""
    files = [folder / key for key in SENT_KEYS]
    there = {file.name: file.read_text(errors="replace").strip() for file in files if file.is_file()}
    headers = dict(more)
    if "bearerToken" in there:
        headers["Authorization"] = f"Bearer {there['bearerToken']}"
    elif "username" in there:
        pair = f"{there['username']}:{there.get('password', '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    if "customAuthHeader" in there:
        headers[there["customAuthHeader"]] = there.get("customAuthValue", "")
    return headers


def _texts(info: Answer, ask: Callable[..., Answer]) -> dict[str, Object]:
    """Returns the round trip of a text through the tokenizer and the detokenizer of each model."""
    out: dict[str, Object] = {}
    for model in info.body.get("models", ()) if isinstance(info.body, dict) else ():
        ids = ask("/tokenize", {"model": model["id"], "prompt": SAMPLE, "add_special_tokens": False})
        tokens = ids.body.get("tokens") if ids.good and isinstance(ids.body, dict) else None
        again = ask("/detokenize", {"model": model["id"], "tokens": tokens}) if tokens else UNASKED
        text = again.body.get("text") if again.good and isinstance(again.body, dict) else None
        if isinstance(text, str):
            out[model["id"]] = {"said": SAMPLE, "ids": tokens, "read": text, "vocab_size": model["vocab_size"]}
    return out

"""Renders the chart like `helm upgrade`. The chart's look-ups go to an API server on loopback with only the given objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import helm_python as helm
import yaml

from tests.chart.loopback_server import QuietHandler, serving
from tests.chart.release import CHART, INSTALLABLE, NAME, NAMESPACE, Object, Values, merged

PLURALS = {"Secret": "secrets", "Deployment": "deployments", "StatefulSet": "statefulsets"}
ABSENT: Object = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def rendered_over(there: Sequence[Object], values: Values) -> list[Object]:
    """Returns the rendered objects of an upgrade.

    Args:
        there: objects that exist in the namespace.

    Raises:
        helm.HelmError: the chart refuses the values.
    """
    with _api_server(there) as url, helm.Config(kubeconfig_content=_kubeconfig(url), namespace=NAMESPACE) as config:
        about: dict[str, Any] = {"name": NAME, "namespace": NAMESPACE, "is_install": False, "is_upgrade": True, "revision": 2}
        found = config.render(helm.Chart.load(CHART), merged(INSTALLABLE, values), **about)
    texts = (text for path, text in sorted(found.items()) if not path.endswith("NOTES.txt"))
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def _kubeconfig(url: str) -> str:
    named: Object = {"clusters": [{"name": "it", "cluster": {"server": url}}], "users": [{"name": "it", "user": {}}]}
    contexts = [{"name": "it", "context": {"cluster": "it", "user": "it"}}]
    return json.dumps({"apiVersion": "v1", "kind": "Config", **named, "contexts": contexts, "current-context": "it"})


def _answers(there: Sequence[Object]) -> dict[str, Object]:
    """Returns the API server's responses by path: lists of the kinds of each API group, and the existing objects."""
    out: dict[str, Object] = {}
    for group in ("v1", "apps/v1"):
        kinds = {kind: plural for kind, plural in PLURALS.items() if (kind == "Secret") == (group == "v1")}
        rows = [{"name": name, "kind": kind, "namespaced": True, "verbs": ["get"]} for kind, name in kinds.items()]
        out[_root(group)] = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": rows}
    for each in there:
        path = f"{_root(each['apiVersion'])}/namespaces/{NAMESPACE}/{PLURALS[each['kind']]}/{each['metadata']['name']}"
        out[path] = each
    return out


def _root(group: str) -> str:
    return f"/apis/{group}" if "/" in group else f"/api/{group}"


@contextmanager
def _api_server(there: Sequence[Object]) -> Iterator[str]:
    answers = _answers(there)

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            found = answers.get(urlsplit(self.path).path)
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(ABSENT if found is None else found).encode())

    with serving(Handler) as url:
        yield url

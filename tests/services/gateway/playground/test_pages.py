"""Tests of the pages for browsers: headers, file contents, and routes."""

from __future__ import annotations

import re
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rootstock_llm.services.gateway.playground import static_page
from tests.chart.dockerfile import context_files
from tests.services.gateway.documented import Answered, Documented
from tests.services.gateway.system import System

ROOT = Path(__file__).resolve().parents[4]
FOLDER = Path(static_page.__file__).resolve().parent
PAGES = {"/": FOLDER / static_page.PLAYGROUND, "/docs": FOLDER / static_page.REFERENCE}
NAMESPACE = "http://www.w3.org/2000/svg"  # the identifier of a namespace; browsers do not fetch this URL
# Functions that turn text into markup, run text, or store text beyond the page.
NEVER = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "createContextualFragment", "document.write", "srcdoc", "DOMParser"),
    *("eval(", "new Function", "import(", "importScripts"),
    *("localStorage", "sessionStorage", "indexedDB", "document.cookie", "pushState", "replaceState", "sendBeacon", "WebSocket"),
)


class Markup(HTMLParser):
    """Collects the attributes of all elements, and the contents of `script` and `style` elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.within: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in self.within:
            self.within[self.cdata_elem].append(data)


@pytest.fixture(scope="module")
def served() -> Iterator[System]:
    with System(playground=True, keys=["a"]) as system:
        yield system


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_page_has_the_content_of_the_file_and_needs_no_api_key(served: System, page: str) -> None:
    answer = served.get(page)
    assert (answer.status_code, answer.text) == (200, PAGES[page].read_text())
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert served.get("/v1/models").status_code == 401


def test_page_policy_allows_only_the_script_and_style_of_the_page(served: System, page: str) -> None:
    answer = served.get(page)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    for language in ("script", "style"):
        (text,) = Markup(answer.text).within[language]
        assert policy.pop(f"{language}-src") == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
        "connect-src": "'self'",
        "img-src": "data:",
    }


def test_page_refers_to_no_other_host(page: str) -> None:
    text = PAGES[page].read_text()
    assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[^'\"\s>]*", text)) <= {NAMESPACE}
    assert "@import" not in text and not re.search(r"\burl\(", text)
    for tag, name, value in Markup(text).attributes:
        assert name not in ("style", "srcset", "action", "formaction", "target") and not name.startswith("on"), (tag, name)
        assert name != "src" and (name != "href" or re.match(r"/(docs|openapi\.json)$|data:image/svg", value)), (tag, value)


def test_page_never_uses_functions_that_run_or_store_text(page: str) -> None:
    text = PAGES[page].read_text()
    assert [word for word in NEVER if word in text] == []


def test_page_responses_match_the_openapi_document(served: System) -> None:
    documented = Documented(served.get("/openapi.json").json())
    answers = [served.request(method, path) for path in PAGES for method in ("GET", "HEAD", "OPTIONS", "POST")]
    assert [answer.status_code for answer in answers] == [200, 200, 204, 405] * 2
    assert [fault for answer in answers for fault in documented.faults(Answered.of(answer))] == []
    assert served.metric("rootstock_gateway_requests_total", route="/", code="200") >= 2


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("keys", [(), ("a",)], ids=["without keys", "with keys"])
def test_page_path_is_unknown_when_the_playground_is_off(keys: tuple[str, ...]) -> None:
    with System(keys=keys) as system:
        ids = {"x-request-id": "same"}
        off, nowhere = (system.get(path, headers=ids) for path in ("/", "/nowhere"))
        assert (off.status_code, off.content) == (nowhere.status_code, nowhere.content)
        assert off.headers.keys() == nowhere.headers.keys()
        assert "/" not in system.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("text", ["<style></style>", "<script></script><script></script><style></style>"], ids=["none", "two"])
def test_page_without_exactly_one_script_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error occurs when the gateway starts, because a browser would only block the page."""
    (tmp_path / "odd.html").write_text(text)
    monkeypatch.setattr(static_page, "_FOLDER", tmp_path)
    with pytest.raises(ValueError, match="one <script>"):
        static_page.static_page("odd.html")


def test_pages_are_in_the_package_and_in_the_image() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in data["rootstock_llm.services.gateway.playground"] for path in FOLDER.glob(pattern)}
    assert packaged == set(PAGES.values())
    assert {str(path.relative_to(ROOT)) for path in PAGES.values()} <= {str(path) for path in context_files(ROOT, ["services"])}

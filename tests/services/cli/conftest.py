from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.cli.fake_server import FakeServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A fake server that is the commands' default server."""
    with FakeServer() as fake:
        monkeypatch.setenv("ROOTSTOCK_URL", fake.url)
        monkeypatch.delenv("ROOTSTOCK_API_KEY", raising=False)
        yield fake

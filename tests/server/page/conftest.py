"""A browser for the tests of this folder, and for each test a server and a page that must not complain."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.server.page.browser import NAMES, find_browser, open_browser, watch
from tests.server.page.fake_server import FakeServer


@pytest.fixture(scope="package")  # no wider: asyncio tests cannot run beside Playwright's loop
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH (Debian: apt-get install chromium)")
    with open_browser(path) as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def allowed_complaints() -> list[str]:
    """A test that provokes errors adds what the browser may say about them."""
    return []


@pytest.fixture
def page(browser: Browser, server: FakeServer, allowed_complaints: list[str]) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    tab = context.new_page()
    complaints = watch(tab)
    yield tab
    context.close()
    assert [c for c in complaints if not any(allowed in c for allowed in allowed_complaints)] == []

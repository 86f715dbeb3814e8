"""Tools of a tool server on the page, with the real server and the bundled model: the reader has each call run."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

pytest.importorskip("mcp", reason="needs the extra mcp")

from tests.helpers.servers.serving import Server
from tests.server.page.browser import finished, open_page, open_parameters, say, watch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture
def where() -> Iterator[str]:
    """The URL of a tool server."""
    words = [sys.executable, "-m", "tests.helpers.servers.tool_server", "http", "add"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def test_a_call_is_run_when_the_reader_says_so(browser: Browser, where: str) -> None:
    with Server("--device", "cpu", "--tool-server", where) as server:
        context = browser.new_context(viewport={"width": 1200, "height": 800})
        page = context.new_page()
        complaints = watch(page)
        open_page(page, server.url)
        open_parameters(page)
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("sums (1)").check()
        called = finished(say(page, "What is 27 + 45?"))
        result = called.get_by_label("Result of add", exact=True)
        expect(result).to_have_value("")
        called.get_by_role("button", name="Run add").click()
        expect(result).to_have_value("72")
        page.get_by_role("button", name="Send results").click()
        expect(page.locator(".message.assistant")).to_have_count(2)
        told = finished(page.locator(".message.assistant").last).inner_text()
        context.close()
    assert "72" in told
    assert complaints == []

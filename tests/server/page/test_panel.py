"""The live panel: figures of the moment from counters that grow."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.server.page.browser import open_page
from tests.server.page.fake_server import FakeServer

pytestmark = pytest.mark.slow


def test_it_shows_what_the_server_counts(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    expect(page.locator("#running")).to_have_text("4")  # of two models
    expect(page.locator("#waiting")).to_have_text("1")
    expect(page.locator("#step")).to_have_text("7")
    expect(page.locator("#kv")).to_have_text("38%")  # 300 of 800 pages
    expect(page.locator("#pages")).to_have_text("300 of 800 pages")
    expect(page.locator("#hits")).to_have_text("60%")
    expect(page.locator("#preemptions")).to_have_text("2")
    expect(page.locator("#ttft")).to_have_text("250 ms")
    expect(page.locator("#throughput")).not_to_have_text("–")
    assert len((page.locator("#line").get_attribute("points") or "").split()) >= 1


def test_it_stops_asking_while_the_tab_is_hidden(page: Page, server: FakeServer) -> None:
    page.clock.install()  # before the page has a timer: one that was set earlier would run by the real clock
    open_page(page, server.url)
    hide = "s => { Object.defineProperty(document, 'visibilityState', {value: s, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, "hidden")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(10_000)
    assert asked == []
    with page.expect_request("**/metrics"):
        page.evaluate(hide, "visible")


def test_it_says_when_the_server_is_gone_and_comes_back(
    page: Page, server: FakeServer, allowed_complaints: list[str]
) -> None:
    allowed_complaints.append("ERR_FAILED")
    open_page(page, server.url)
    page.route("**/metrics", lambda route: route.abort())
    expect(page.locator("#stale")).to_have_text("The server does not answer. Trying again.")
    page.unroute("**/metrics")
    expect(page.locator("#stale")).to_have_text("")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        # two seconds: 10 then 30 tokens, two first tokens that took 0.5 s together
        ([(0, 100, 10, 1.0), (1, 110, 11, 1.2), (2, 140, 12, 1.5)], {"rates": [10, 30], "ttft": 0.25}),
        ([(0, 100, 10, 1.0), (4, 180, 10, 1.0)], {"rates": [20], "ttft": None}),  # a gap; nobody got a first token
        ([(0, 100, 10, 1.0), (1, 5, 1, 0.1)], {"rates": [], "ttft": None}),  # the server began anew
        # what is older than a minute has left
        ([(0, 0, 0, 0.0), (30, 30, 1, 9.0), (70, 70, 2, 10.0), (80, 90, 3, 10.5)], {"rates": [1, 2], "ttft": 0.75}),
        ([(0, 0, 0, 0.0), (3600, 9000, 9, 9.0)], {"rates": [], "ttft": None}),  # the tab was hidden for an hour
        ([(0, 7, 1, 1.0)], {"rates": [], "ttft": None}),
    ],
)
def test_counters_become_figures(
    page: Page, server: FakeServer, samples: list[tuple[float, ...]], expected: dict[str, Any]
) -> None:
    page.goto(server.url)
    found = page.evaluate(
        """async (samples) => {
            const { History } = await import("./page/panel/metrics.js");
            const history = new History();
            const ttft = "vllm:time_to_first_token_seconds";
            for (const [time, tokens, count, sum] of samples)
                history.push(time, new Map([["vllm:generation_tokens_total", tokens],
                    [ttft + "_count", count], [ttft + "_sum", sum]]));
            const rates = history.rates("vllm:generation_tokens_total").map(([, rate]) => rate);
            return { rates, ttft: history.timeToFirstToken ?? null };
        }""",
        samples,
    )
    assert found["rates"] == pytest.approx(expected["rates"])
    assert found["ttft"] == pytest.approx(expected["ttft"])

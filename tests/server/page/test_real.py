"""The page on the real server, with the bundled model."""

import json

import pytest
from playwright.sync_api import Browser, expect

from tests.helpers.servers.serving import Server
from tests.server.page.browser import finished, open_parameters, say, use_page, watch

pytestmark = pytest.mark.slow

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = json.dumps([{"name": "get_weather", "description": "Get the weather in a city", "parameters": CITY}])


def test_the_page_talks_with_the_bundled_model(browser: Browser) -> None:
    with Server("--device", "cpu") as server:
        context = browser.new_context(viewport={"width": 1200, "height": 800})
        page = context.new_page()
        complaints = watch(page)
        seen = use_page(page, server.url, "What is the capital of France?")
        say(page, "word " * 3000)
        expect(page.locator("#notice")).to_contain_text("which takes at most 1024 tokens")
        page.get_by_label("Message", exact=True).fill("")
        after = finished(say(page, "What is the capital of Italy?")).inner_text()
        open_parameters(page)
        page.get_by_label("Tools, as JSON").fill(WEATHER)
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="New conversation", exact=True).click()
        called = finished(say(page, "What is the weather in Paris?"))
        expect(called.locator(".call pre")).to_have_text('{\n  "city": "Paris"\n}')
        called.get_by_label("Result of get_weather", exact=True).fill("sunny, 21 degrees")
        page.get_by_role("button", name="Send results").click()
        expect(page.locator(".message.assistant")).to_have_count(2)
        told = finished(page.locator(".message.assistant").last).inner_text()
        context.close()
    assert "The weather in Paris: sunny, 21 degrees." in told
    assert "Paris" in seen.answer and "Rome" in after
    assert seen.tokens_after > seen.tokens_before
    assert [complaint for complaint in complaints if "status of 400" not in complaint] == []

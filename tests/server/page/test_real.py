"""The page on the real server, with the bundled model."""

from playwright.sync_api import Browser

from tests.helpers.serving import Server
from tests.server.page.browser import use_page, watch


def test_the_page_talks_with_the_bundled_model(browser: Browser) -> None:
    with Server("--device", "cpu") as server:
        context = browser.new_context(viewport={"width": 1200, "height": 800})
        page = context.new_page()
        complaints = watch(page)
        seen = use_page(page, server.url, "What is the capital of France?")
        context.close()
    assert "Paris" in seen.answer
    assert seen.tokens_after > seen.tokens_before
    assert complaints == []

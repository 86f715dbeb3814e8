"""The page on the real server, with the bundled model."""

from playwright.sync_api import Browser, expect

from tests.helpers.serving import Server
from tests.server.page.browser import finished, say, use_page, watch


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
        context.close()
    assert "Paris" in seen.answer and "Rome" in after
    assert seen.tokens_after > seen.tokens_before
    assert [complaint for complaint in complaints if "status of 400" not in complaint] == []

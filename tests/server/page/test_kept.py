"""The conversation outlives a reload, within a bound, and goes when the reader says so."""

import json
import re

import pytest
from playwright.sync_api import Page, expect

from tests.server.page.browser import body, finished, open_page, say
from tests.server.page.fake_server import FakeServer, Script, answer, chunk, ending

pytestmark = pytest.mark.slow

KEEP = """async (messages) => {
    const { Kept } = await import("./page/kept.js");
    const kept = new Kept();
    kept.save(messages);
    return [kept.load().messages, Object.values(localStorage)[0].length];
}"""


def store(page: Page, text: str) -> None:
    """What the page finds when it opens."""
    page.add_init_script(f"localStorage.setItem(`quintet.conversation:${{location.pathname}}`, {json.dumps(text)})")


def test_a_reload_shows_it_again_and_goes_on(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("<think>hm</think>**Hello**")), Script(answer("Yes."))]
    open_page(page, server.url)
    stats = finished(say(page, "Hi")).locator(".stats").inner_text()
    page.reload()
    message = finished(page.locator(".message.assistant"))
    expect(body(message).locator("strong")).to_have_text("Hello")
    expect(message.locator("details.thinking summary")).to_have_text(re.compile("^Thoughts"))
    expect(message.locator(".stats")).to_have_text(stats)
    expect(page.locator("#empty")).to_be_hidden()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    finished(say(page, "Again?"))
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Hi", "Hello".join(["**", "**"]), "Again?"]


def test_new_conversation_leaves_nothing(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Hello.")))
    open_page(page, server.url)
    finished(say(page, "Hi"))
    assert "Hello." in page.evaluate("JSON.stringify(localStorage)")
    page.get_by_role("button", name="New conversation").click()
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator(".message")).to_have_count(0)


def test_new_conversation_ends_the_answer_that_streams(page: Page, server: FakeServer) -> None:
    server.scripts += [Script([chunk("Half an ")], [ending(1)]), Script(answer("New."))]
    open_page(page, server.url)
    expect(body(say(page, "Hi"))).to_have_text("Half an")
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".message")).to_have_count(0)
    assert page.evaluate("localStorage.length") == 0
    expect(body(finished(say(page, "Hi")))).to_have_text("New.")
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Hi"]


def test_a_reload_within_an_answer_keeps_what_came(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([chunk("Half an ")], [ending(1)]))
    open_page(page, server.url)
    expect(body(say(page, "Hi"))).to_have_text("Half an")
    page.reload()
    message = finished(page.locator(".message.assistant"), "stopped")
    expect(body(message)).to_have_text("Half an")


def test_a_reload_before_the_first_word_gives_the_text_back(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([chunk()], [ending(1)]))
    open_page(page, server.url)
    say(page, "Hi")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")
    expect(page.locator(".message")).to_have_count(0)


def test_the_oldest_turns_go_where_it_grows_too_long(page: Page, server: FakeServer) -> None:
    page.goto(server.url)
    roles = ["user", "assistant"] * 50
    messages = [{"role": role, "content": f"{at} " + "ä" * 20_000} for at, role in enumerate(roles)]
    kept, size = page.evaluate(KEEP, messages)
    assert size <= 1_000_000
    assert kept[0]["role"] == "user"
    assert [m["content"] for m in kept] == [m["content"] for m in messages[-len(kept) :]]
    assert len(kept) >= 40


@pytest.mark.parametrize(
    "stored", ["{", "null", "[1]", '{"messages": [{"role": "system", "content": 1}]}', '{"messages": 3}']
)
def test_what_is_no_conversation_is_not_shown(page: Page, server: FakeServer, stored: str) -> None:
    server.scripts.append(Script(answer("Hello.")))
    store(page, stored)
    open_page(page, server.url)
    expect(page.locator("#empty")).to_be_visible()
    expect(body(finished(say(page, "Hi")))).to_have_text("Hello.")


def test_a_browser_that_keeps_nothing_still_talks(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Hello.")))
    page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    open_page(page, server.url)
    expect(body(finished(say(page, "Hi")))).to_have_text("Hello.")


def test_a_hostile_store_stays_text(page: Page, server: FakeServer) -> None:
    hostile = {"role": "assistant", "name": "<b>x</b>", "content": "<img src=x>", "state": "done", "stats": "<i>"}
    store(page, json.dumps({"messages": [{"role": "user", "content": "Hi"}, hostile]}))
    open_page(page, server.url)
    expect(page.locator(".message.assistant")).to_contain_text("<img src=x>")
    expect(page.locator("#messages :is(img, b, i)")).to_have_count(0)

"""Calls are cards, and the reader answers them by hand: as text, which is never read as HTML."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.server.page.browser import body, finished, open_page, open_parameters, say
from tests.server.page.fake_server import FakeServer, Script, answer, calling, chunk, ending, part

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def cards(message: Locator) -> Locator:
    return message.get_by_role("group", name=re.compile("^Call of"))


def offer_tools(page: Page, text: str) -> Locator:
    """The field, filled."""
    open_parameters(page)
    field = page.get_by_label("Tools, as JSON")
    field.fill(text)
    return field


@pytest.mark.parametrize("given", [[TOOL], [TOOL["function"]]])
def test_a_call_is_answered_by_hand_and_the_model_goes_on(page: Page, server: FakeServer, given: Any) -> None:
    server.scripts += [Script(calling(("get_weather", '{"city":"Paris"}'), reasoning="Hm.")), Script(answer("Sunny."))]
    open_page(page, server.url)
    offer_tools(page, json.dumps(given))
    message = finished(say(page, "Weather?"))
    assert server.requests[0]["tools"] == [TOOL]
    expect(cards(message).locator("pre")).to_have_text('{\n  "city": "Paris"\n}')
    expect(message.locator("details.thinking summary")).to_have_text(re.compile(r"^Thoughts, [0-9.]+ s$"))
    field = message.get_by_label("Result of get_weather", exact=True)
    field.fill("sunny, 21 degrees")
    message.get_by_role("button", name="Send results").click()
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(body(finished(page.locator(".message.assistant").last))).to_have_text("Sunny.")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    _, called, result = server.requests[1]["messages"]
    call = {"id": "id0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    assert called == {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]}
    assert result == {"role": "tool", "tool_call_id": "id0", "content": "sunny, 21 degrees"}
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)
    first = page.locator(".message.assistant").first
    expect(cards(first).locator("pre").last).to_have_text("sunny, 21 degrees")


def test_results_outlive_a_reload_and_an_error(page: Page, server: FakeServer, allowed_complaints: list[str]) -> None:
    allowed_complaints += ["status of 502"]
    server.scripts += [Script(calling(("f", "{}"), ("g", '{"a":1}'))), Script([b""], status=502), Script(answer("Ok."))]
    open_page(page, server.url)
    message = finished(say(page, "Go"))
    message.get_by_label("Result of f", exact=True).fill("one")
    message.get_by_label("Result of g", exact=True).fill("two")
    message.get_by_role("button", name="Send results").click()
    expect(page.locator("#notice")).to_be_visible()
    expect(message.get_by_label("Result of g", exact=True)).to_have_value("two")
    page.reload()
    message = finished(page.locator(".message.assistant"))
    expect(message.get_by_label("Result of f", exact=True)).to_have_value("one")
    message.get_by_role("button", name="Send results").click()
    expect(body(finished(page.locator(".message.assistant").last))).to_have_text("Ok.")
    assert [each.get("content") for each in server.requests[2]["messages"]] == ["Go", None, "one", "two"]


def test_calls_that_nobody_answered_are_not_sent(page: Page, server: FakeServer) -> None:
    server.scripts += [Script([chunk("Let me see."), *calling(("f", "{}"))]), Script(answer("Fine."))]
    open_page(page, server.url)
    expect(cards(finished(say(page, "Go")))).to_have_count(1)
    finished(say(page, "Never mind."))
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "Let me see."}


def test_a_call_shows_as_it_comes_and_one_that_broke_off_is_not_answered(page: Page, server: FakeServer) -> None:
    begun = [part(0, "", "f"), part(0, '{"a": "<img src=x onerror=alert(1)>')]
    server.scripts.append(Script(begun, [ending(5, "length")]))
    open_page(page, server.url)
    message = say(page, "Go")
    expect(cards(message).locator("pre")).to_have_text('{"a": "<img src=x onerror=alert(1)>')
    expect(message).to_have_attribute("data-state", "streaming")
    server.go_on.set()
    expect(finished(message).locator(".stats")).to_contain_text("max tokens reached")
    expect(message.get_by_role("button", name="Send results")).to_have_count(0)
    expect(message.locator("img")).to_have_count(0)


def test_a_hostile_call_stays_text(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(calling(("<b>f</b>", json.dumps({"<i>": "<img src=x>"})))))
    open_page(page, server.url)
    message = finished(say(page, "Go"))
    expect(cards(message).locator("pre")).to_contain_text('"<i>": "<img src=x>"')
    expect(cards(message)).to_contain_text("Calls <b>f</b>")
    expect(message.locator(":is(img, b, i)")).to_have_count(0)


@pytest.mark.parametrize("text", ["{", '{"name": "f"}', '[{"type": "function"}]', "[3]"])
def test_what_are_no_tools_is_not_sent(page: Page, server: FakeServer, text: str) -> None:
    server.scripts.append(Script(answer("Hi.")))
    open_page(page, server.url)
    field = offer_tools(page, text)
    say(page, "Hello")
    expect(field).to_have_js_property("validity.valid", False)
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hello")
    assert server.requests == []
    field.fill("")
    page.get_by_label("Message", exact=True).press("Enter")
    finished(page.locator(".message.assistant").last)
    assert "tools" not in server.requests[0]

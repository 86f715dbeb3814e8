"""Presets: named sets of the parameters form, kept in the browser within bounds."""

import json

import pytest
from playwright.sync_api import Page, expect

from tests.server.page.browser import finished, open_page, open_parameters, say
from tests.server.page.fake_server import FakeServer, Script, answer

pytestmark = pytest.mark.slow


def save(page: Page, name: str) -> None:
    page.get_by_label("Save as").fill(name)
    page.get_by_role("button", name="Save preset").click()


def options(page: Page) -> list[str]:
    return page.get_by_label("Preset", exact=True).locator("option").all_text_contents()


def put(page: Page, text: str) -> None:
    """What the storage holds when the page opens."""
    page.add_init_script(f"localStorage.setItem(`quintet.presets:${{location.pathname}}`, {json.dumps(text)})")


def test_a_preset_is_saved_chosen_and_sent(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Yes.")))
    open_page(page, server.url)
    open_parameters(page)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    save(page, "  Brief \n one ")
    expect(page.locator("#preset-note")).to_have_text("Saved “Brief one”.")
    expect(page.get_by_label("Preset", exact=True)).to_have_value("Brief one")
    page.reload()
    open_parameters(page)
    page.get_by_label("Top p").fill("0.9")  # a preset replaces every field
    page.get_by_label("Preset", exact=True).select_option("Brief one")
    expect(page.locator("#changed")).to_have_text("2 set")
    finished(say(page, "Hi"))
    request = server.requests[0]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert request["temperature"] == 0.5 and "top_p" not in request


def test_a_preset_of_the_same_name_is_replaced(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    open_parameters(page)
    for value in ("0.1", "0.2"):
        page.get_by_label("Temperature").fill(value)
        save(page, "Cold")
    assert options(page) == ["none", "Cold"]
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Preset", exact=True).select_option("")
    page.get_by_label("Preset", exact=True).select_option("Cold")
    expect(page.get_by_label("Temperature")).to_have_value("0.2")


def test_a_deleted_preset_comes_back_by_undo(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    open_parameters(page)
    page.get_by_label("Temperature").fill("0.1")
    save(page, "<b>Cold</b>")
    page.get_by_role("button", name="Delete preset").click()
    expect(page.locator("#toast")).to_contain_text("Deleted the preset “<b>Cold</b>”.")
    assert options(page) == ["none saved"] and page.locator("#toast b").count() == 0
    page.get_by_role("button", name="Undo").click()
    assert options(page) == ["none", "<b>Cold</b>"]
    expect(page.get_by_role("button", name="Delete preset")).to_be_enabled()


def test_a_preset_needs_a_name(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    open_parameters(page)
    save(page, " \u202e ")
    expect(page.locator("#preset-note")).to_have_text("A preset needs a name.")
    expect(page.get_by_label("Save as")).to_be_focused()
    assert options(page) == ["none saved"]


def test_two_tabs_have_the_same_presets(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    open_parameters(page)
    other = page.context.new_page()
    open_page(other, server.url)
    open_parameters(other)
    save(page, "One")
    save(other, "Two")
    expect(page.get_by_label("Preset", exact=True).locator("option")).to_have_text(["none", "One", "Two"])


def test_presets_are_bounded(page: Page, server: FakeServer) -> None:
    put(page, json.dumps([{"name": f"{at}", "values": {}} for at in range(50)]))
    open_page(page, server.url)
    open_parameters(page)
    save(page, "one more")
    expect(page.locator("#preset-note")).to_contain_text("There is no room for the preset: at most 50 presets")
    page.get_by_label("System prompt").fill("x" * 400_000)
    save(page, "7")
    expect(page.locator("#preset-note")).to_contain_text("400 thousand characters")
    assert len(options(page)) == 51


def test_a_browser_that_keeps_nothing_says_so(page: Page, server: FakeServer) -> None:
    page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    open_page(page, server.url)
    open_parameters(page)
    save(page, "One")
    expect(page.locator("#preset-note")).to_contain_text("The preset is not kept: the browser has no room")


@pytest.mark.parametrize(
    "stored",
    [
        "{",
        "null",
        "{}",
        '[null, 3, {"name": 1}, {"name": "", "values": {}}]',
        '[{"name": "x", "values": "temperature"}]',
    ],
)
def test_what_is_no_preset_is_left_out(page: Page, server: FakeServer, stored: str) -> None:
    put(page, stored)
    open_page(page, server.url)
    assert options(page) == ["none saved"]


def test_a_preset_sets_fields_alone(page: Page, server: FakeServer) -> None:
    values = {"temperature": 3, "system": "<img src=x>", "__proto__": {"x": 1}, "innerHTML": "<b>x</b>", "key": "k"}
    put(page, json.dumps([{"name": "hostile", "values": values}]))
    open_page(page, server.url)
    open_parameters(page)
    page.get_by_label("Preset", exact=True).select_option("hostile")
    expect(page.get_by_label("System prompt")).to_have_value("<img src=x>")
    expect(page.get_by_label("Temperature")).to_have_value("")
    expect(page.locator("#settings :is(b, img)")).to_have_count(0)

"""Key shortcuts and their list, and the theme."""

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.page.browser import body, finished, open_page, say
from tests.server.page.fake_server import FakeServer, Script, answer, chunk, ending

pytestmark = pytest.mark.slow

GROUND = "getComputedStyle(document.body).backgroundColor"


def test_the_keys_do_what_their_list_says(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("One.")), Script([chunk("Half")], [ending(1)])]
    open_page(page, server.url)
    field = page.get_by_label("Message", exact=True)
    finished(say(page, "Hi"))
    page.keyboard.press("ArrowUp")
    expect(page.locator(".message.user").get_by_label("Edit")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".edit")).to_have_count(0)
    page.locator("#messages").focus()
    page.keyboard.press("/")
    expect(field).to_be_focused()
    expect(field).to_have_value("")
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    message = say(page, "More")
    expect(body(message)).to_have_text("Half")
    page.locator("#messages").focus()
    page.keyboard.press("Escape")
    finished(message, "stopped")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#empty")).to_be_visible()
    expect(field).to_be_focused()


def test_letters_in_a_field_stay_letters(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    field = page.get_by_label("Message", exact=True)
    field.press_sequentially("/?")
    expect(field).to_have_value("/?")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("ArrowUp")
    expect(field).to_be_focused()


def test_the_list_of_keys_opens_and_closes(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    page.locator("#messages").focus()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Key shortcuts")
    expect(dialog.locator("dt")).to_have_text(
        [
            "Send",
            "Begin a new line",
            "New conversation",
            "Search conversations",
            "Stop the answer",
            "Edit the last question (from the empty field)",
            "Go to the message field",
            "Show this list",
        ]
    )
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search conversations")).not_to_be_focused()  # the dialog has the keys
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Key shortcuts").click()
    page.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Key shortcuts")).to_be_focused()


def test_the_theme_is_the_systems_until_one_is_chosen(page: Page, server: FakeServer) -> None:
    page.emulate_media(color_scheme="dark")
    open_page(page, server.url)
    dark = page.evaluate(GROUND)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(GROUND)
    assert dark != light
    theme = page.get_by_label("Theme")
    theme.select_option("Dark")
    assert page.evaluate(GROUND) == dark
    page.reload()
    expect(theme).to_have_value("dark")
    assert page.evaluate(GROUND) == dark
    other = page.context.new_page()
    other.emulate_media(color_scheme="dark")
    open_page(other, server.url)
    other.get_by_label("Theme").select_option("Light")
    assert other.evaluate(GROUND) == light
    expect(theme).to_have_value("light")  # of the first tab
    theme.select_option("System")
    assert page.evaluate("localStorage.getItem('quintet.theme')") is None
    expect(other.get_by_label("Theme")).to_have_value("")
    assert other.evaluate(GROUND) == dark


def test_a_stored_theme_that_is_none_follows_the_system(page: Page, server: FakeServer) -> None:
    page.add_init_script("localStorage.setItem('quintet.theme', '\"><img src=x>')")
    open_page(page, server.url)
    expect(page.get_by_label("Theme")).to_have_value("")
    expect(page.locator("html")).not_to_have_attribute("data-theme", re.compile("."))


def test_a_phone_has_the_conversations_behind_a_button(browser: Browser, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Hello.")))
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    open_page(page, server.url)
    finished(say(page, "Hi"))
    button = page.get_by_role("button", name="Conversations", exact=True)
    expect(page.get_by_role("navigation")).to_be_hidden()
    button.tap()
    expect(button).to_have_attribute("aria-expanded", "true")
    page.get_by_role("button", name="Hi", exact=True).tap()
    expect(page.get_by_role("navigation")).to_be_hidden()
    expect(body(page.locator(".message.assistant"))).to_have_text("Hello.")
    context.close()

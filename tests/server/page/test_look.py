"""The page can be read and used: at any width, in light and dark, by eye, keyboard and screen reader."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.page.browser import finished, open_page, open_parameters, say, use_page, watch
from tests.server.page.fake_server import FakeServer, Script, answer, calling, chunk, ending
from tests.server.page.test_chat import logprob

pytestmark = pytest.mark.slow

TEXT = (
    "<think>Hm.</think>Some **bold** text, `code`, [a link](https://example.org) and\n\n```python\n"
    + "long = 'line'  # " * 20 + "\n```\n\n> quoted\n\n|" + " wide column |" * 20 + "\n" + "|--" * 20 + "|\n"
)  # fmt: skip

# The lowest contrast of any text that is seen, by the formula of WCAG 2.2 (1.4.3), and where it is.
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const paint = (color) => { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); };
    const pixel = () => [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    const luminance = (rgb) => rgb.map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const under = (element) => {
        if (!element) return paint("white");
        under(element.parentElement);
        paint(getComputedStyle(element).backgroundColor);
    };
    const seen = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility()
        && !e.closest(".hidden, svg") && [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
    return seen.map((element) => {
        under(element);
        const ground = luminance(pixel());
        paint(getComputedStyle(element).color);
        const ink = luminance(pixel());
        const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
        return [ratio, `${element.tagName}.${element.className} ${element.textContent.slice(0, 20)}`];
    }).sort((a, b) => a[0] - b[0])[0];
}"""


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[400, 1600])
def view(request: pytest.FixtureRequest, browser: Browser, server: FakeServer, scheme: Any) -> Iterator[Page]:
    """Closed before the server is: the page would complain."""
    size: Any = {"width": request.param, "height": 800}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    complaints = watch(page)
    yield page
    context.close()
    assert complaints == []


def test_nothing_sticks_out_and_all_text_can_be_read(view: Page, server: FakeServer) -> None:
    doubtful = [logprob(word, share, {"x": 0.1}) for word, share in (("sure", 0.99), (" maybe", 0.4), (" no", 0.01))]
    tokens = [*(chunk(entry["token"], logprobs=[entry]) for entry in doubtful), ending(3)]
    calls = calling(
        ("look_up", json.dumps({"a": "long " * 60, "b": "x" * 300})), ("cut_off", "{"), reasoning="Hm. " * 90
    )
    server.scripts += [Script(answer(TEXT)), Script(tokens), Script(calls)]
    use_page(view, server.url, "A question that is long enough to be wrapped where the screen is narrow. " * 3)
    open_parameters(view)
    view.get_by_label("Token probabilities").check()
    finished(say(view, "And?")).get_by_role("option").nth(2).focus()
    expect(view.get_by_role("tooltip")).to_be_in_viewport(ratio=1)
    expect(view.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
    message = finished(say(view, "Call."))
    expect(message.get_by_label("Result of look_up", exact=True)).to_be_visible()
    expect(message.get_by_label("Arguments of cut_off")).to_have_text("{")
    message.locator("summary").click()
    view.locator("#file").set_input_files({"name": "long-name" * 12 + ".txt", "mimeType": "", "buffer": b"x"})
    expect(view.locator(".chip")).to_be_visible()
    if not view.get_by_role("navigation").is_visible():
        view.get_by_role("button", name="Conversations", exact=True).click()
    view.get_by_role("button", name="Actions for").click()
    view.get_by_label("Save as").fill("long-name" * 6)
    view.get_by_role("button", name="Save preset").click()
    view.get_by_role("button", name="Delete preset").click()
    expect(view.locator("#toast")).to_be_visible()
    expect(view.get_by_role("button", name="Send", exact=True)).to_be_in_viewport(ratio=1)
    boxes = ("html", "main", "nav", "#conversations", "#files", "#toast", "#messages", "aside", ".alternatives")
    assert [box for box in boxes if view.locator(box).evaluate("e => e.scrollWidth > e.clientWidth")] == []
    ratio, where = view.evaluate(CONTRAST)
    assert ratio >= 4.5, where


def test_phones_do_not_zoom_into_fields(browser: Browser, server: FakeServer) -> None:
    """iOS zooms into a field whose letters are under 16 px, and stays there."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    open_page(page, server.url)
    page.get_by_role("heading", name="Parameters").click()
    fields = page.locator("textarea, select, input:not([type=checkbox])")
    sizes = fields.evaluate_all("all => all.map((field) => parseFloat(getComputedStyle(field).fontSize))")
    context.close()
    assert len(sizes) > 10 and min(sizes) >= 16


def test_parameters_stand_above_the_figures(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    assert page.locator("aside h2").all_inner_texts() == ["Parameters", "Live"]


def test_every_request_goes_to_the_server(page: Page, server: FakeServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    server.scripts.append(Script(answer("![a](https://example.org/a.png) https://example.org")))
    open_page(page, server.url)
    page.get_by_label("Theme").select_option("Dark")
    page.locator("#file").set_input_files({"name": "a.txt", "mimeType": "", "buffer": b"<img src=//example.org>"})
    finished(say(page, "Hi"))
    page.get_by_role("button", name="Export all as JSON").click()
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((server.url, "blob:" + server.url.split("/behind")[0]))] == []


def test_every_field_has_a_name(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    open_parameters(page)
    fields = page.locator("input, select, textarea, progress").filter(visible=True).all()
    assert len(fields) > 10
    for field in fields:
        expect(field).to_have_accessible_name(re.compile(r"\w"))


def test_the_keyboard_reaches_the_answer_and_comes_back(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("```\ncode\n```")))
    open_page(page, server.url)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    finished(say(page, "Hi"))
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("button", name="Delete")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()

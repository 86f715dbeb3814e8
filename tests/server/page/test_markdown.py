"""Markdown becomes elements; nothing in it is read as HTML, loads anything, or runs."""

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.server.page.browser import body, finished, open_page, say
from tests.server.page.fake_server import FakeServer, Script, answer, chunk, ending

pytestmark = pytest.mark.slow


def shown(page: Page, server: FakeServer, text: str) -> Locator:
    """The answer, as the page draws it."""
    server.scripts.append(Script(answer(text)))
    open_page(page, server.url)
    return finished(say(page, "Hi")).locator(".body")


def test_markdown_becomes_elements(page: Page, server: FakeServer) -> None:
    text = "# Title\n\n1. one\n2. two\n   - deep\n\nplain *and* `code`\n\n```python\nprint('hi')\n"
    message = shown(page, server, text)
    expect(message.get_by_role("heading", name="Title")).to_be_visible()
    expect(message.locator("ol > li")).to_have_count(2)
    expect(message.locator("ol li ul li")).to_have_text("deep")
    expect(message.locator("em")).to_have_text("and")
    expect(message.locator("pre code")).to_have_text("print('hi')\n")


def test_marks_within_marks(page: Page, server: FakeServer) -> None:
    message = shown(page, server, "**bold *both* `a*b`** __too__ ~~gone~~ snake_case_name 2*3*4 \\*plain\\*")
    expect(message.locator("strong").first).to_have_text("bold both a*b")
    expect(message.locator("strong em")).to_have_text("both")
    expect(message.locator("strong code")).to_have_text("a*b")
    expect(message.locator("strong").nth(1)).to_have_text("too")
    expect(message.locator("del")).to_have_text("gone")
    expect(message.locator("p")).to_contain_text("snake_case_name 2*3*4 *plain*")
    expect(message.locator("em")).to_have_count(1)


def test_an_item_holds_paragraphs_and_code(page: Page, server: FakeServer) -> None:
    message = shown(page, server, "1. First:\n\n   ```sh\n   ls\n   ```\n\n2. Second,\n   goes on\n\nEnd.")
    expect(message.locator("ol")).to_have_count(1)
    expect(message.locator("ol > li")).to_have_count(2)
    expect(message.locator("li").first.locator("pre code")).to_have_text("ls")
    expect(message.locator("li").nth(1)).to_contain_text("goes on")
    expect(message.locator(":scope > p")).to_have_text("End.")


def test_a_quote_holds_blocks(page: Page, server: FakeServer) -> None:
    message = shown(page, server, "> # Said\n>\n> - one\n> - two\n\n---\n\nafter")
    expect(message.locator("blockquote").get_by_role("heading", name="Said")).to_be_visible()
    expect(message.locator("blockquote li")).to_have_count(2)
    expect(message.get_by_role("separator")).to_have_count(1)


def test_a_table(page: Page, server: FakeServer) -> None:
    text = "| Name | Size |\n|:--|--:|\n| `a\\|b` | **1** |\n| c |\n\nafter"
    message = shown(page, server, text)
    assert message.get_by_role("columnheader").all_inner_texts() == ["Name", "Size"]
    assert message.get_by_role("cell").all_inner_texts() == ["a|b", "1", "c", ""]
    expect(message.get_by_role("columnheader", name="Size")).to_have_css("text-align", "right")
    expect(message.locator("p")).to_have_text("after")


def test_links_lead_out_without_telling_where_from(page: Page, server: FakeServer) -> None:
    text = (
        "[docs](https://example.org/a_(b)?c=*d*) and <https://example.org/x>, https://example.org/y. [m](mailto:a@b.c)"
    )
    links = shown(page, server, text).get_by_role("link")
    found = [link.get_attribute("href") for link in links.all()]
    assert found == [
        "https://example.org/a_(b)?c=*d*", "https://example.org/x", "https://example.org/y", "mailto:a@b.c",
    ]  # fmt: skip
    for link in links.all():
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert link.get_attribute("target") == "_blank"


@pytest.mark.parametrize(
    "text",
    [
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](java\tscript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "[a](vbscript:x)",
        "[a](//example.org)",
        "[a](page/app.js)",
        "[a](blob:example)",
        "<javascript:alert(1)>",
        "[a](&#106;avascript:alert(1))",
    ],
)
def test_other_addresses_stay_text(page: Page, server: FakeServer, text: str) -> None:
    message = shown(page, server, text)
    expect(message).to_have_text(text.replace("\t", " "))
    expect(message.locator("a")).to_have_count(0)


def test_images_are_links_and_nothing_is_loaded(page: Page, server: FakeServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    message = shown(
        page, server, "![a cat](https://example.org/cat.png) <img src=https://example.org/x.png> ![](data:,x)"
    )
    expect(message.get_by_role("link", name="a cat")).to_have_attribute("href", "https://example.org/cat.png")
    expect(message.locator("img")).to_have_count(0)
    expect(message).to_contain_text("![](data:,x)")
    assert all(url.startswith(server.url) for url in asked)


def test_code_can_be_copied(page: Page, server: FakeServer) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    message = shown(page, server, "```python\nif a:\n    print(1)\n```\n\n~~~\nplain\n~~~")
    buttons = message.get_by_role("button", name="Copy code")
    expect(buttons).to_have_count(2)
    buttons.first.click()
    expect(buttons.first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "if a:\n    print(1)"


def test_what_is_whole_stays_while_the_rest_grows(page: Page, server: FakeServer) -> None:
    """A selection, or the focus on a copy button, outlives the next word."""
    server.scripts.append(Script([chunk("```\ncode\n```\n\nOne")], [chunk(" two."), ending(2)]))
    open_page(page, server.url)
    message = body(say(page, "Hi"))
    expect(message.locator("p")).to_have_text("One")
    button = message.get_by_role("button", name="Copy code")
    button.focus()
    server.go_on.set()
    expect(message.locator("p")).to_have_text("One two.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(button).to_be_focused()


@pytest.mark.parametrize(
    "text", ["*" * 20_000, "[" * 20_000, "> " * 5_000 + "x", "- " * 5_000 + "x", "`" * 20_001 + "x"]
)
def test_no_text_takes_long_or_breaks_the_page(page: Page, server: FakeServer, text: str) -> None:
    page.goto(server.url)
    milliseconds = page.evaluate(
        """async (text) => {
            const { render } = await import("./page/markdown/markdown.js");
            const begun = performance.now();
            render(text);
            return performance.now() - begun;
        }""",
        text,
    )
    assert milliseconds < 10_000  # a few on an idle machine; what grows with the square of the text takes minutes

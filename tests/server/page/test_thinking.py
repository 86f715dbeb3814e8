"""What a model thinks is folded away from what it answers, and is not sent back to it."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.server.page.browser import body, finished, open_page, say
from tests.server.page.fake_server import FakeServer, Script, answer, chunk, ending

pytestmark = pytest.mark.slow


def thoughts(message: Locator) -> Locator:
    return message.locator("details.thinking")


def is_open(message: Locator) -> bool:
    return bool(thoughts(message).evaluate("e => e.open"))


def tags(first: str, second: str, said: str) -> tuple[list[bytes], list[bytes], list[bytes]]:
    return [chunk("<thi"), chunk("nk>\n" + first)], [chunk(second + "\n</th"), chunk("ink>\n\n")], [chunk(said)]


def fields(name: str) -> tuple[list[bytes], list[bytes], list[bytes]]:
    return [chunk(**{name: "First "})], [chunk(**{name: "second."})], [chunk("Four.")]


@pytest.mark.parametrize(
    "parts", [tags("First ", "second.", "Four."), fields("reasoning"), fields("reasoning_content")]
)
def test_it_is_open_while_it_streams_and_folded_after(
    page: Page, server: FakeServer, parts: tuple[list[bytes], list[bytes], list[bytes]]
) -> None:
    first, second, said = parts
    server.scripts += [Script(first, [*second, *said, ending(3)]), Script(answer("Five."))]
    open_page(page, server.url)
    message = say(page, "2 + 2?")
    expect(thoughts(message)).to_contain_text("First")
    expect(thoughts(message).locator("summary")).to_have_text("Thinking …")
    assert is_open(message)
    server.go_on.set()
    expect(body(finished(message))).to_have_text("Four.")
    expect(thoughts(message).locator("summary")).to_have_text(re.compile("^Thoughts"))
    assert not is_open(message)
    thoughts(message).locator("summary").click()
    expect(thoughts(message)).to_contain_text("First second.")
    finished(say(page, "And 5?"))
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "Four."}


def test_a_reader_who_folds_it_has_his_way(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([chunk("<think>One")], [chunk(" two"), chunk("</think>Done."), ending(3)]))
    open_page(page, server.url)
    message = say(page, "Hi")
    expect(thoughts(message)).to_contain_text("One")
    thoughts(message).locator("summary").click()
    thoughts(message).locator("summary").click()
    server.go_on.set()
    expect(body(finished(message))).to_have_text("Done.")
    assert is_open(message)


def test_half_a_tag_is_not_shown(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([chunk("<think>I see.\n</thi")], [chunk("nk>Yes."), ending(2)]))
    open_page(page, server.url)
    message = say(page, "Hi")
    expect(thoughts(message)).to_contain_text("I see.")
    assert "</thi" not in message.inner_text()
    server.go_on.set()
    expect(body(finished(message))).to_have_text("Yes.")


def test_a_thought_whose_beginning_stood_in_the_prompt(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("So it is.\n</think>\n\nYes.")))
    open_page(page, server.url)
    message = finished(say(page, "Hi"))
    expect(body(message)).to_have_text("Yes.")
    expect(thoughts(message).locator("summary")).to_have_text(re.compile("^Thoughts"))


def test_an_answer_about_the_tag_is_an_answer(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Write `<think>` and `</think>` around it.")))
    open_page(page, server.url)
    message = finished(say(page, "Hi"))
    expect(body(message)).to_have_text("Write <think> and </think> around it.")
    expect(thoughts(message)).to_be_hidden()


def test_a_thought_that_was_cut_off_stays_in_sight(page: Page, server: FakeServer) -> None:
    server.scripts += [Script([chunk("<think>Hm"), ending(1, "length")]), Script(answer("Yes."))]
    open_page(page, server.url)
    message = finished(say(page, "Hi"))
    assert is_open(message)
    expect(thoughts(message)).to_contain_text("Hm")
    expect(message.locator(".stats")).to_contain_text("max tokens reached")
    finished(say(page, "Well?"))
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": ""}

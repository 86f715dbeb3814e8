"""What goes wrong is said in plain words, and costs nobody his text or his conversation."""

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.server.page.browser import body, finished, open_page, say
from tests.server.page.fake_server import FakeServer, Script, answer, chunk, ending, event, refusal

LONG = "This model's maximum context length is 256 tokens with at least one of output, and the prompt has 900 tokens"
TOO_LONG = Script(refusal(LONG, "context_length_exceeded"), status=400)


@pytest.fixture(autouse=True)
def provoked(allowed_complaints: list[str]) -> None:
    allowed_complaints += ["status of 400", "status of 401", "status of 429", "status of 502", "ERR_"]


def field(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def notice(page: Page) -> Locator:
    return page.locator("#notice")


def contents(server: FakeServer, at: int) -> list[str]:
    return [message["content"] for message in server.requests[at]["messages"]]


def test_a_turn_that_is_too_long_comes_back_and_the_next_one_works(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("Hello.")), TOO_LONG, Script(answer("Better."))]
    open_page(page, server.url)
    finished(say(page, "Hi"))
    say(page, "far too long")
    expect(notice(page)).to_contain_text("too long for the model")
    expect(notice(page)).to_contain_text("at most 256 tokens")
    expect(field(page)).to_have_value("far too long")
    expect(page.locator(".message")).to_have_count(2)
    say(page, "short")
    expect(body(page.locator(".message.assistant").last)).to_have_text("Better.")
    expect(notice(page)).to_be_hidden()
    assert contents(server, 2) == ["Hi", "Hello.", "short"]


def test_an_edited_question_that_is_too_long_stays_in_its_field(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("Paris.")), TOO_LONG, Script(answer("Rome."))]
    open_page(page, server.url)
    finished(say(page, "France?"))
    question = page.locator(".message.user")
    question.get_by_role("button", name="Edit").click()
    question.get_by_label("Edit").fill("far too long")
    question.get_by_role("button", name="Save").click()
    expect(notice(page)).to_contain_text("too long for the model")
    expect(question.get_by_label("Edit")).to_have_value("far too long")
    expect(body(page.locator(".message.assistant"))).to_have_text("Paris.")
    question.get_by_label("Edit").fill("Italy?")
    question.get_by_role("button", name="Save").click()
    expect(body(page.locator(".message.assistant"))).to_have_text("Rome.")
    assert contents(server, 2) == ["Italy?"]


def test_an_answer_that_cannot_be_made_again_stays(page: Page, server: FakeServer) -> None:
    server.scripts += [
        Script(answer("One.")),
        Script(refusal("The queue is full."), status=429),
        Script(answer("Two.")),
    ]
    open_page(page, server.url)
    finished(say(page, "Count"))
    page.get_by_role("button", name="Regenerate").click()
    expect(notice(page)).to_have_text("The queue is full.")
    expect(body(page.locator(".message.assistant"))).to_have_text("One.")
    finished(say(page, "And?"))
    assert contents(server, 2) == ["Count", "One.", "And?"]


def test_what_was_typed_meanwhile_is_kept_too(page: Page, server: FakeServer) -> None:
    error = event({"error": {"message": "The step failed.", "type": "server_error"}})
    server.scripts.append(Script([event({"choices": []})], [error]))
    open_page(page, server.url)
    say(page, "Hi")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    field(page).fill("next")
    server.go_on.set()
    expect(notice(page)).to_have_text("The step failed.")
    expect(field(page)).to_have_value("Hi\n\nnext")


def test_stopping_before_the_first_word_takes_the_turn_back(page: Page, server: FakeServer) -> None:
    server.scripts += [Script([event({"choices": []})], [ending(1)]), Script(answer("Yes."))]
    open_page(page, server.url)
    say(page, "Hi")
    page.get_by_role("button", name="Stop").click()
    expect(field(page)).to_have_value("Hi")
    expect(page.locator(".message")).to_have_count(0)
    expect(notice(page)).to_be_hidden()
    finished(say(page, "Hi again"))
    assert contents(server, 1) == ["Hi again"]


def test_a_refusal_is_shown_with_its_reason(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(refusal("The queue is full."), status=429, headers={"Retry-After": "3"}))
    open_page(page, server.url)
    say(page, "Hi")
    expect(notice(page)).to_have_text("The queue is full. Try again in 3 s.")
    expect(notice(page)).to_have_role("alert")
    expect(field(page)).to_have_value("Hi")


def test_a_dead_server_is_told_in_plain_words(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Back.")))
    open_page(page, server.url)
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    say(page, "Hi")
    expect(notice(page)).to_contain_text("The server does not answer")
    expect(notice(page)).to_contain_text("start it again, then send again")
    expect(field(page)).to_have_value("Hi")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Send").click()
    expect(body(page.locator(".message.assistant"))).to_have_text("Back.")
    assert contents(server, 0) == ["Hi"]


def test_a_proxy_without_its_server_says_the_same(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([b"<html>Bad Gateway</html>"], status=502))
    open_page(page, server.url)
    say(page, "Hi")
    expect(notice(page)).to_contain_text("The server does not answer")


def test_an_error_within_the_stream_is_shown(page: Page, server: FakeServer) -> None:
    error = event({"error": {"message": "The step failed.", "type": "server_error", "param": None, "code": None}})
    server.scripts += [Script([chunk("So far"), error]), Script(answer("Better."))]
    open_page(page, server.url)
    page.set_viewport_size({"width": 1000, "height": 300})
    message = finished(say(page, "Hi"), "failed")
    expect(message.get_by_role("alert")).to_have_text("The step failed.")
    expect(message.get_by_role("button", name="Delete")).to_be_in_viewport(ratio=1)
    expect(body(message)).to_have_text("So far")
    page.get_by_role("button", name="Regenerate").click()
    expect(body(page.locator(".message.assistant").last)).to_have_text("Better.")


def test_a_torn_stream_is_no_answer(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([chunk("Half"), b'data: {"cho']))
    open_page(page, server.url)
    message = finished(say(page, "Hi"), "failed")
    expect(message.get_by_role("alert")).to_contain_text("The connection ended before the answer did.")


def test_a_server_with_keys_asks_for_one(page: Page, server: FakeServer) -> None:
    server.key = "right"
    server.scripts.append(Script(answer("Welcome.")))
    page.goto(server.url)
    key = page.get_by_label("This server asks for an API key")
    expect(key).to_be_focused()
    expect(page.locator("#key-error")).to_be_hidden()  # nobody gave a wrong one yet
    key.fill("wrong")
    with page.expect_response(lambda r: r.status == 401 and r.request.headers.get("authorization") == "Bearer wrong"):
        key.press("Enter")
    expect(page.locator("#key-error")).to_contain_text("The server does not know this key.")
    expect(key).to_have_value("")
    key.fill("right")
    key.press("Enter")
    expect(page.get_by_label("Model", exact=True)).to_be_enabled()
    expect(page.locator("#running")).to_have_text("4")
    expect(body(finished(say(page, "Hi")))).to_have_text("Welcome.")
    expect(key).to_be_hidden()
    session, local, cookies = page.evaluate(
        "() => [{...sessionStorage}, JSON.stringify(localStorage), document.cookie]"
    )
    assert [name for name, value in session.items() if value == "right"] == ["quintet.api-key"]
    assert "right" not in local and cookies == ""


def test_a_turn_without_a_key_comes_back(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Welcome.")))
    open_page(page, server.url)
    server.key = "right"
    say(page, "Hi")
    key = page.get_by_label("This server asks for an API key")
    expect(key).to_be_focused()
    expect(notice(page)).to_have_text("The server asks for an API key. Give it above, then send again.")
    expect(field(page)).to_have_value("Hi")
    key.fill("right")
    key.press("Enter")
    page.get_by_role("button", name="Send").click()
    expect(body(page.locator(".message.assistant"))).to_have_text("Welcome.")
    assert contents(server, 0) == ["Hi"]

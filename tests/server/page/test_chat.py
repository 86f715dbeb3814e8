"""The chat: what is typed is sent, what comes is shown, and only as text."""

import json
import math
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.server.page.browser import finished, open_page, say, use_page
from tests.server.page.fake_server import MODEL, FakeServer, Script, answer, chunk, ending, event


def body(message: Locator) -> Locator:
    return message.locator(".body")


def test_it_answers_and_the_panel_moves(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Hello", ", ", "world.")))
    used = use_page(page, server.url, "Hi")
    assert used.answer == "Hello, world."
    assert used.tokens_after > used.tokens_before
    (request,) = server.requests
    assert request["model"] == MODEL
    assert request["messages"] == [{"role": "user", "content": "Hi"}]
    assert request["stream"] is True
    assert not {"temperature", "top_p", "seed", "stop", "logprobs"} & request.keys()


def test_the_answer_shows_while_it_streams(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([chunk("First")], [chunk(" second"), ending(2)]))
    open_page(page, server.url)
    message = say(page, "Hi")
    expect(body(message)).to_have_text("First")
    expect(message).to_have_attribute("data-state", "streaming")
    expect(message).to_have_attribute("aria-busy", "true")
    server.go_on.set()
    expect(body(finished(message))).to_have_text("First second")
    expect(message.locator(".stats")).to_contain_text("2 tokens")
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "polite")
    assert server.requests[0]["stream_options"] == {"include_usage": True}


def test_stop_hangs_up_and_keeps_what_came(page: Page, server: FakeServer) -> None:
    server.scripts += [Script([chunk("Half an ")], [ending(1)]), Script(answer("Whole."))]
    open_page(page, server.url)
    message = say(page, "Hi")
    expect(body(message)).to_have_text("Half an")
    page.get_by_role("button", name="Stop").click()
    expect(body(finished(message, "stopped"))).to_have_text("Half an")
    assert server.hung_up.wait(60)
    finished(say(page, "Go on"))
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Hi", "Half an ", "Go on"]


def test_the_last_answer_is_made_again_edited_and_deleted(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer(text)) for text in ("One.", "Two.", "Three.")]
    open_page(page, server.url)
    finished(say(page, "Count"))
    page.get_by_role("button", name="Regenerate").click()
    message = page.locator(".message.assistant").last
    expect(body(finished(message))).to_have_text("Two.")
    assert server.requests[1]["messages"] == [{"role": "user", "content": "Count"}]

    message.get_by_role("button", name="Edit").click()
    message.get_by_label("Edit").fill("Zwei.")
    message.get_by_role("button", name="Save").click()
    expect(body(message)).to_have_text("Zwei.")
    finished(say(page, "And?"))
    assert server.requests[2]["messages"][1] == {"role": "assistant", "content": "Zwei."}

    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".message")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)


def test_an_edited_question_is_asked_again(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("Paris.")), Script(answer("Rome."))]
    open_page(page, server.url)
    finished(say(page, "France?"))
    question = page.locator(".message.user")
    question.get_by_role("button", name="Edit").click()
    question.get_by_label("Edit").fill("Italy?")
    question.get_by_role("button", name="Save").click()
    expect(body(page.locator(".message.assistant"))).to_have_text("Rome.")
    assert server.requests[1]["messages"] == [{"role": "user", "content": "Italy?"}]


def test_parameters_are_sent_as_they_are_set(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Yes.")))
    open_page(page, server.url)
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 64,
        "seed": 7,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
    }
    for name, value in wanted.items():
        page.get_by_label(name.replace("_", " ").capitalize()).fill(str(value))
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Stop strings").fill("END\n\\n\\n\n")
    page.get_by_label("Model", exact=True).select_option("other")
    finished(say(page, "Hi"))
    (request,) = server.requests
    assert {name: request[name] for name in wanted} == wanted
    assert request["stop"] == ["END", "\n\n"]
    assert request["model"] == "other"
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_parameter_out_of_range_is_not_sent(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    page.get_by_label("Top p").fill("1.5")
    say(page, "Hi")
    expect(page.get_by_label("Top p")).to_be_focused()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")
    assert server.requests == []


def logprob(token: str, share: float, others: dict[str, float], data: bytes | None = None) -> dict[str, Any]:
    top = [{"token": text, "logprob": math.log(p), "bytes": None} for text, p in {token: share, **others}.items()]
    return {"token": token, "logprob": math.log(share), "bytes": list(data or token.encode()), "top_logprobs": top}


def test_tokens_show_their_probabilities(page: Page, server: FakeServer) -> None:
    euro = "€".encode()
    tokens = [
        logprob("The", 0.9, {"A": 0.05}),
        logprob(" cat", 0.25, {" dog": 0.5, "\n": 0.01}),
        logprob("\\xe2", 0.7, {}, euro[:1]),
        logprob("\\x82\\xac", 0.99, {}, euro[1:]),
    ]
    texts = ["The", " cat", "", "€"]
    server.scripts.append(
        Script([*(chunk(text, logprobs=[t]) for text, t in zip(texts, tokens, strict=True)), ending(4)])
    )
    open_page(page, server.url)
    page.get_by_label("Token probabilities").check()
    message = finished(say(page, "Hi"))
    assert (server.requests[0]["logprobs"], server.requests[0]["top_logprobs"]) == (True, 5)
    shown = message.get_by_role("option")
    assert shown.all_text_contents() == texts
    tints = [token.evaluate("e => getComputedStyle(e).backgroundColor") for token in shown.all()]
    assert len(set(tints)) == len(tints)  # each by its own probability

    tooltip = page.get_by_role("tooltip")
    shown.nth(1).hover()
    expect(tooltip.get_by_role("listitem")).to_have_count(3)
    assert tooltip.get_by_role("listitem").all_inner_texts() == ["␣dog\n50.0%", "␣cat\n25.0%", "⏎\n1.0%"]
    page.mouse.move(0, 0)
    expect(tooltip).to_be_hidden()

    shown.nth(0).focus()
    expect(tooltip).to_contain_text("90.0%")
    page.keyboard.press("ArrowRight")
    expect(shown.nth(1)).to_be_focused()
    expect(shown.nth(1)).to_have_accessible_description("␣dog 50.0% ␣cat 25.0% ⏎ 1.0%")
    page.keyboard.press("Escape")
    expect(tooltip).to_be_hidden()

    page.get_by_label("Token probabilities").uncheck()
    expect(shown).to_have_count(0)
    expect(body(message)).to_have_text("The cat€")


def test_hostile_output_stays_text(page: Page, server: FakeServer) -> None:
    hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script>[a](javascript:alert(1))'
    text = f"{hostile}\n\n**{hostile}**\n\n- `{hostile}`\n\n```html\n{hostile}\n```"
    entry = logprob(hostile, 0.5, {"<b>x</b>": 0.5})
    server.scripts += [Script([chunk(text), ending(1)]), Script([chunk(hostile, logprobs=[entry]), ending(1)])]
    open_page(page, server.url)
    message = finished(say(page, hostile))
    expect(message.locator("p").first).to_have_text(hostile)
    expect(message.locator("strong")).to_have_text(hostile)
    expect(message.locator("li code")).to_have_text(hostile)
    expect(message.locator("pre code")).to_have_text(hostile)
    page.get_by_label("Token probabilities").check()
    token = finished(say(page, "Again")).get_by_role("option")
    expect(token).to_have_text(hostile)
    token.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("<b>x</b>")
    assert page.locator("#messages :is(img, script, a, b, iframe), #alternatives b").count() == 0
    assert page.title() == "quintet"


def test_markdown_becomes_elements(page: Page, server: FakeServer) -> None:
    text = "# Title\n\n1. one\n2. two\n   - deep\n\nplain *and* `code`\n\n```python\nprint('hi')\n"
    server.scripts.append(Script(answer(text)))
    open_page(page, server.url)
    message = finished(say(page, "Hi"))
    expect(message.get_by_role("heading", name="Title")).to_be_visible()
    expect(message.locator("ol > li")).to_have_count(2)
    expect(message.locator("ol li ul li")).to_have_text("deep")
    expect(message.locator("em")).to_have_text("and")
    expect(message.locator("pre code")).to_have_text("print('hi')\n")


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
    expect(message.get_by_role("alert")).to_have_text("The connection ended before the answer did.")


def test_a_refusal_is_shown_with_its_reason(page: Page, server: FakeServer, allowed_complaints: list[str]) -> None:
    allowed_complaints.append("status of 429")
    refusal = json.dumps({"error": {"message": "The queue is full.", "type": "rate_limit_error"}}).encode()
    server.scripts.append(Script([refusal], status=429, headers={"Retry-After": "3"}))
    open_page(page, server.url)
    message = finished(say(page, "Hi"), "failed")
    expect(message.get_by_role("alert")).to_have_text("The queue is full. Try again in 3 s.")


def test_a_server_with_keys_asks_for_one(page: Page, server: FakeServer, allowed_complaints: list[str]) -> None:
    allowed_complaints.append("status of 401")
    server.key = "right"
    server.scripts.append(Script(answer("Welcome.")))
    page.goto(server.url)
    field = page.get_by_label("This server asks for an API key")
    expect(field).to_be_focused()
    expect(page.get_by_text("This key is not known.").first).to_be_visible()
    field.fill("wrong")
    with page.expect_response(lambda r: r.status == 401 and r.request.headers.get("authorization") == "Bearer wrong"):
        field.press("Enter")
    expect(field).to_be_visible()  # the server refused it, so the field is back
    expect(field).to_have_value("")
    field.fill("right")
    field.press("Enter")
    expect(page.get_by_label("Model", exact=True)).to_be_enabled()
    expect(page.locator("#running")).to_have_text("4")
    expect(body(finished(say(page, "Hi")))).to_have_text("Welcome.")
    expect(field).to_be_hidden()
    stores = page.evaluate("() => [Object.values(sessionStorage), localStorage.length, document.cookie]")
    assert stores == [["right"], 0, ""]

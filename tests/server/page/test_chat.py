"""The chat: what is typed is sent, what comes is shown, and only as text."""

import math
from typing import Any

from playwright.sync_api import Page, expect

from tests.server.page.browser import body, finished, open_page, open_parameters, say, use_page
from tests.server.page.fake_server import MODEL, FakeServer, Script, answer, chunk, ending


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
    page.get_by_role("button", name="New conversation", exact=True).click()
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
    open_parameters(page)
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
    open_parameters(page)
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
    open_parameters(page)
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
    open_parameters(page)
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
    assert page.title().endswith("quintet")


def test_an_empty_page_offers_three_questions(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Paris.")))
    open_page(page, server.url)
    examples = page.locator("#examples").get_by_role("button")
    expect(examples).to_have_count(3)
    text = examples.first.inner_text()
    examples.first.click()
    expect(body(finished(page.locator(".message.assistant")))).to_have_text("Paris.")
    assert server.requests[0]["messages"] == [{"role": "user", "content": text}]
    expect(examples).not_to_be_visible()
    page.get_by_role("button", name="New conversation", exact=True).click()
    expect(examples.first).to_be_visible()


def test_an_answer_without_text_keeps_its_turn(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("")), Script(answer("Now."))]
    open_page(page, server.url)
    finished(say(page, "Hi"))
    finished(say(page, "And?"))
    assert [m["role"] for m in server.requests[1]["messages"]] == ["user", "assistant", "user"]


def test_every_answer_can_be_copied(page: Page, server: FakeServer) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    server.scripts += [Script(answer("<think>hm</think>\n\n**One**, `two`")), Script(answer("Last."))]
    open_page(page, server.url)
    finished(say(page, "Hi"))
    finished(say(page, "And?"))
    copy = page.locator(".message.assistant").first.get_by_role("button", name="Copy answer")
    copy.click()
    expect(copy).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "**One**, `two`"


def test_copying_works_where_the_browser_gives_no_clipboard(page: Page, server: FakeServer) -> None:
    """As over plain HTTP from another machine, where navigator.clipboard is not there."""
    server.scripts.append(Script(answer("Take this.")))
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    open_page(page, server.url)
    copy = finished(say(page, "Hi")).get_by_role("button", name="Copy answer")
    copy.click()
    expect(copy).to_have_text("Copied")
    field = page.get_by_label("Message", exact=True)
    field.focus()
    page.keyboard.press("Control+v")
    expect(field).to_have_value("Take this.")

"""The choice of model, and the context gauge: tokens of the conversation of those that the model takes."""

import pytest
from playwright.sync_api import Page, expect

from tests.server.page.browser import begin, finished, open_page, open_parameters, say
from tests.server.page.fake_server import MODEL, FakeServer, Script, answer

pytestmark = pytest.mark.slow

PATH = "/home/me/models/gemma-3-270m-Q4_K_M.gguf"


def labels(page: Page) -> list[str]:
    return page.get_by_label("Model", exact=True).locator("option").all_text_contents()


def gauge(page: Page) -> str:
    return page.locator("#context-text").inner_text()


def test_a_path_is_shown_as_a_name_and_sent_whole(page: Page, server: FakeServer) -> None:
    server.models = [{"id": PATH}, {"id": "Qwen/Qwen3-8B"}, {"id": r"C:\models\a.gguf"}, {"id": "./folder/model/"}]
    server.scripts.append(Script(answer("Hi.")))
    open_page(page, server.url)
    assert labels(page) == ["gemma-3-270m-Q4_K_M.gguf", "Qwen/Qwen3-8B", "a.gguf", "model"]
    message = finished(say(page, "Hi"))
    expect(message.locator("h3")).to_have_text("gemma-3-270m-Q4_K_M.gguf")
    assert server.requests[0]["model"] == PATH
    assert page.title() == "gemma-3-270m-Q4_K_M.gguf · quintet"


def test_equal_names_keep_their_paths(page: Page, server: FakeServer) -> None:
    server.models = [{"id": "/a/m.gguf"}, {"id": "/b/m.gguf"}]
    open_page(page, server.url)
    assert labels(page) == ["/a/m.gguf", "/b/m.gguf"]


def test_the_choice_outlives_a_reload(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    page.get_by_label("Model", exact=True).select_option("other")
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_have_value("other")
    server.models = [{"id": MODEL}]
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_have_value(MODEL)


def test_the_list_says_which_models_are_loaded(page: Page, server: FakeServer) -> None:
    server.models = [{"id": "a", "status": "loaded"}, {"id": "b", "status": {"value": "unloaded"}}, {"id": "c"}]
    server.models.append({"id": "<b>d</b>", "status": "<i>" * 20})
    server.scripts.append(Script(answer("Hi.")))
    open_page(page, server.url)
    assert labels(page) == ["a (loaded)", "b (not loaded)", "c", "<b>d</b> (<i><i><i><i><i><i><i)"]
    expect(page.locator("#model :is(b, i)")).to_have_count(0)
    page.get_by_label("Model", exact=True).select_option("b")
    server.models[0]["status"], server.models[1]["status"] = "unloaded", "loaded"
    finished(say(page, "Hi"))
    expect(page.get_by_label("Model", exact=True).locator("option").nth(1)).to_have_text("b (loaded)")
    assert labels(page)[0] == "a (not loaded)"
    expect(page.get_by_label("Model", exact=True)).to_have_value("b")


def test_the_gauge_has_the_usage_of_the_last_answer(page: Page, server: FakeServer) -> None:
    server.models = [{"id": MODEL, "max_model_len": 1024}, {"id": "small", "max_model_len": 8}]
    server.scripts.append(Script(answer("Hello", ".")))
    open_page(page, server.url)
    expect(page.locator("#context")).to_be_hidden()
    finished(say(page, "Hi"))
    expect(page.locator("#context-text")).to_have_text("7 of 1,024 tokens")  # 5 of the prompt, 2 of the answer
    expect(page.get_by_role("progressbar", name="Context")).to_have_js_property("value", 7 / 1024)
    page.reload()
    expect(page.locator("#context-text")).to_have_text("7 of 1,024 tokens")
    assert server.tokenized == []
    page.get_by_label("Model", exact=True).select_option("small")
    expect(page.locator("#context-text")).to_have_text("7 of 8 tokens")
    begin(page)
    expect(page.locator("#context")).to_be_hidden()


def test_the_server_counts_what_is_typed_and_attached(page: Page, server: FakeServer) -> None:
    server.models = [{"id": MODEL, "max_model_len": 10}]
    open_page(page, server.url)
    open_parameters(page)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Message", exact=True).fill("one two three")
    expect(page.locator("#context-text")).to_have_text("5 of 10 tokens")
    page.get_by_label("Message", exact=True).fill("1 2 3 4 5 6 7 8")
    expect(page.locator("#context-text")).to_have_text("10 of 10 tokens, nearly full")
    page.locator("#file").set_input_files({"name": "a.txt", "mimeType": "", "buffer": b"x y z"})
    expect(page.locator("#context-text")).to_have_text("17 of 10 tokens, too long for this model")
    body = server.tokenized[-1]
    assert body["model"] == MODEL
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    assert body["messages"][1]["content"] == "File: a.txt\n```\nx y z\n```\n\n1 2 3 4 5 6 7 8"


def test_a_server_without_tokenize_is_asked_once(page: Page, server: FakeServer, allowed_complaints: list[str]) -> None:
    allowed_complaints.append("status of 404")
    server.has_tokenize = False
    server.scripts.append(Script(answer("Hello", ".")))
    open_page(page, server.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "tokenize" in request.url else None)
    with page.expect_response("**/tokenize"):
        page.get_by_label("Message", exact=True).fill("one")
    expect(page.locator("#context")).to_be_hidden()
    finished(say(page, "two"))
    expect(page.locator("#context-text")).to_have_text("7 tokens")
    page.get_by_label("Message", exact=True).fill("three")
    page.clock.install()
    page.get_by_label("Message", exact=True).fill("four")
    page.clock.run_for(5000)
    assert len(asked) == 1
    assert gauge(page) == "7 tokens"


def test_counting_does_not_load_a_model(page: Page, server: FakeServer) -> None:
    server.models = [{"id": MODEL, "status": "unloaded", "max_model_len": 10}]
    page.clock.install()
    open_page(page, server.url)
    page.get_by_label("Message", exact=True).fill("one")
    page.clock.run_for(5000)
    assert server.tokenized == []

"""Conversations leave as files and come back: damaged and hostile files are refused, whole, with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.server.page.browser import body, finished, open_page, say
from tests.server.page.fake_server import FakeServer, Script, answer
from tests.server.page.test_conversations import act, talk, titles

pytestmark = pytest.mark.slow

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def export_of(*conversations: Any, **fields: Any) -> str:
    return json.dumps({"format": "quintet.conversations", "version": 1, "conversations": list(conversations), **fields})


def import_file(page: Page, text: str | bytes, name: str = "export.json") -> Locator:
    """The note that reports the result."""
    data = text if isinstance(text, bytes) else text.encode()
    page.locator("#import-file").set_input_files({"name": name, "mimeType": "application/json", "buffer": data})
    return page.locator("#history-note")


def saved(page: Page, button: Locator) -> tuple[str, str]:
    """Name and text of the file that a button downloads."""
    with page.expect_download() as download:
        button.click()
    return download.value.suggested_filename, Path(download.value.path()).read_text(encoding="utf-8")


def test_all_conversations_leave_as_json_and_come_back(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    talk(page, server, "First", "Second")
    act(page, "First", "Rename")
    page.get_by_label("New title for First").fill("A title")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text(["Second", "A title"])
    name, text = saved(page, page.get_by_role("button", name="Export all as JSON"))
    exported = json.loads(text)
    assert name == "conversations.json"
    assert [(c["title"], c["messages"][0]["content"]) for c in exported["conversations"]] == [
        ("", "Second"), ("A title", "First"),
    ]  # fmt: skip
    expect(import_file(page, text)).to_have_text("Imported 0 conversations; 2 conversations were here already.")
    page.evaluate("localStorage.clear()")
    page.reload()
    expect(titles(page)).to_have_count(0)
    expect(import_file(page, text)).to_have_text("Imported 2 conversations.")
    expect(titles(page)).to_have_text(["Second", "A title"])
    page.get_by_role("button", name="A title", exact=True).click()
    expect(body(finished(page.locator(".message.assistant")))).to_have_text("Answer to First.")


def test_one_conversation_leaves_as_a_file_with_its_title(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("<think>Hm.\nWell.</think>The **answer**.")))
    open_page(page, server.url)
    chip = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"```\nfenced\n```"}
    page.locator("#file").set_input_files(chip)
    finished(say(page, '../.a<b>"c": why?'))
    page.get_by_role("button", name="Actions for").click()
    name, text = saved(page, page.get_by_role("button", name="Export as Markdown", exact=True))
    assert name == "a b c why.md"
    title, _, *sections = text.rstrip().split("\n\n")
    assert title == '# ../.a<b>"c": why?'
    assert sections == [
        "## You",
        "File: a.txt\n````\n```\nfenced\n```\n````",
        '../.a<b>"c": why?',
        "## tiny-chat",
        "> Hm.\n> Well.",
        "The **answer**.",
    ]
    name, text = saved(page, page.get_by_role("button", name="Export as JSON", exact=True))
    assert name == "a b c why.json"
    assert json.loads(text)["conversations"][0]["messages"][0]["files"] == [
        {"name": "a.txt", "text": "```\nfenced\n```"}
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"\x00\xff\xfe", "it is not JSON"),
        (export_of({"messages": TURNS})[:-9], "it is not JSON, or a part of it is missing."),
        ("[]", 'it is not an export of this page: "format" is not "quintet.conversations".'),
        ("null", "it is not an export of this page"),
        (json.dumps({"format": "other", "conversations": []}), "it is not an export of this page"),
        (export_of(version=2), "its version is not 1: a newer page wrote it."),
        (export_of({"messages": TURNS}, {"title": "x"}), "conversation 2 has no list of messages."),
        (export_of({"messages": TURNS, "title": {}}), "conversation 1 has a title that is not text."),
        (export_of({"messages": [*TURNS, {"role": "system", "content": "x"}]}), "number 3 has a role other than"),
        (export_of({"messages": [{"role": "user", "content": {"toString": 1}}]}), "number 1 has no text."),
        (export_of({"messages": [{**TURNS[0], "files": [{"name": 1}]}]}), "attached files that are not names"),
        (export_of({"messages": [{**TURNS[1], "calls": [{"id": "x"}]}]}), "tool calls that are not complete."),
        (export_of(*[{"messages": []}] * 501), "it has more than 500 conversations."),
        ("[" * 100_000 + "]" * 100_000, "it is not an export of this page"),
        (b" " * 16_000_001, "it has 17 MB; at most 16 MB are read."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_damaged_file_is_refused_and_nothing_of_it_is_taken(
    page: Page, server: FakeServer, text: str | bytes, reason: str
) -> None:
    open_page(page, server.url)
    note = import_file(page, text, "<b>bad</b>.json")
    expect(note).to_contain_text("<b>bad</b>.json was not imported: ")
    expect(note).to_contain_text(reason)
    expect(note.locator("b")).to_have_count(0)
    expect(titles(page)).to_have_count(0)
    assert page.evaluate("localStorage.length") == 0


def test_a_hostile_file_brings_text_alone(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("Fine.")))
    hostile = '<img src=x onerror="document.title=1">'
    call = {"id": "1", "name": hostile, "arguments": '{"a": 1}', "result": hostile, "extra": 1}
    message = {**TURNS[1], "name": hostile, "content": hostile, "stats": hostile, "took": hostile, "calls": [call]}
    conversation = {"title": hostile, "messages": [TURNS[0], message], "id": "../x", "__proto__": {"polluted": 1}}
    open_page(page, server.url)
    text = export_of(conversation).replace('"extra": 1', '"extra": 1, "__proto__": {"polluted": 1}')
    expect(import_file(page, text)).to_have_text("Imported 1 conversation.")
    page.get_by_role("button", name=hostile, exact=True).click()
    expect(body(page.locator(".message.assistant"))).to_have_text(hostile)
    assert page.locator(":is(#history, #messages) img").count() == 0 and page.title() == "tiny-chat · quintet"
    assert page.evaluate("({}).polluted") is None
    stored = page.evaluate("JSON.stringify(localStorage)")
    assert "polluted" not in stored and "extra" not in stored and "../x" not in stored
    finished(say(page, "And?"))
    assert [m["role"] for m in server.requests[0]["messages"]] == ["user", "assistant", "tool", "user"]


def test_what_does_not_fit_is_not_taken_in_part(page: Page, server: FakeServer) -> None:
    large = [{"title": str(at), "messages": [{"role": "user", "content": "x" * 900_000}]} for at in range(5)]
    open_page(page, server.url)
    note = import_file(page, export_of(*large))
    expect(note).to_contain_text("was not imported: there is no room for it.")
    expect(titles(page)).to_have_count(0)
    assert page.evaluate("localStorage.length") == 0
    expect(import_file(page, export_of(*large[:4]))).to_have_text("Imported 4 conversations.")
    expect(titles(page)).to_have_count(4)

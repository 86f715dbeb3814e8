"""Conversations are kept in the browser, within bounds; the list opens, finds, renames and deletes them."""

import json
import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.server.page.browser import begin, body, finished, open_page, say, watch
from tests.server.page.fake_server import FakeServer, Script, answer, chunk, ending

pytestmark = pytest.mark.slow

SAVE = """async (messages) => {
    const { Store } = await import("./page/conversations/store.js");
    const { Current } = await import("./page/conversations/current.js");
    const store = new Store(() => undefined);
    const reason = new Current(store).save(messages, "", []);
    return [store.all()[0].messages, Object.values(localStorage)[0].length, reason];
}"""
REFUSE = """Storage.prototype.setItem = function () {
    if (this === localStorage) throw new DOMException("full", "QuotaExceededError");
}"""


def store(page: Page, text: str, suffix: str = "#0") -> None:
    """Puts a record into the storage before the page opens; without a suffix under the name of earlier versions."""
    page.add_init_script(
        f"localStorage.setItem(`quintet.conversation:${{location.pathname}}{suffix}`, {json.dumps(text)})"
    )


def titles(page: Page) -> Locator:
    return page.locator("#conversations .title")


def act(page: Page, title: str, action: str) -> None:
    page.get_by_role("button", name=f"Actions for {title}", exact=True).click()
    page.locator("#conversations .actions").get_by_role("button", name=action).click()


def talk(page: Page, server: FakeServer, *texts: str) -> None:
    """A conversation for each text."""
    for text in texts:
        server.scripts.append(Script(answer(f"Answer to {text}.")))
        begin(page)
        finished(say(page, text))


def test_a_reload_shows_it_again_and_goes_on(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("<think>hm</think>**Hello**")), Script(answer("Yes."))]
    open_page(page, server.url)
    stats = finished(say(page, "Hi")).locator(".stats").inner_text()
    page.reload()
    message = finished(page.locator(".message.assistant"))
    expect(body(message).locator("strong")).to_have_text("Hello")
    expect(message.locator("details.thinking summary")).to_have_text(re.compile("^Thoughts"))
    expect(message.locator(".stats")).to_have_text(stats)
    expect(page.locator("#empty")).to_be_hidden()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    finished(say(page, "Again?"))
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Hi", "**Hello**", "Again?"]
    expect(titles(page)).to_have_text(["Hi"])


def test_the_list_opens_each_conversation_the_newest_first(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    expect(page.locator("#history-empty")).to_have_text("None yet.")
    talk(page, server, "First", "Second")
    expect(titles(page)).to_have_text(["Second", "First"])
    expect(page.locator("[aria-current]")).to_have_text("Second")
    page.get_by_role("button", name="First", exact=True).click()
    expect(body(page.locator(".message.assistant"))).to_have_text("Answer to First.")
    expect(page.locator("[aria-current]")).to_have_text("First")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    server.scripts.append(Script(answer("More.")))
    finished(say(page, "Go on"))
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["First", "Answer to First.", "Go on"]
    expect(titles(page)).to_have_text(["First", "Second"])


def test_a_draft_belongs_to_its_conversation(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    talk(page, server, "First", "Second")
    field = page.get_by_label("Message", exact=True)
    field.fill("unsent")
    page.get_by_role("button", name="First", exact=True).click()
    expect(field).to_have_value("")
    page.get_by_role("button", name="Second", exact=True).click()
    expect(field).to_have_value("unsent")
    page.reload()
    expect(field).to_have_value("unsent")


def test_search_finds_titles_and_texts(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    talk(page, server, "Apples", "Pears (and [more])")
    search = page.get_by_label("Search conversations")
    search.fill("aPPl")
    expect(titles(page)).to_have_text(["Apples"])
    search.fill("answer to pears (and [")
    expect(titles(page)).to_have_text(["Pears (and [more])"])
    expect(page.locator("#conversations .match")).to_contain_text("Answer to Pears")
    search.fill("plums")
    expect(titles(page)).to_have_count(0)
    expect(page.locator("#history-empty")).to_have_text("No conversation has this text.")
    search.press("Escape")
    expect(titles(page)).to_have_count(2)


def test_a_new_title_stays_and_is_text(page: Page, server: FakeServer) -> None:
    title = '<img src=x onerror="document.title=1"> "quoted"'
    open_page(page, server.url)
    talk(page, server, "Old")
    act(page, "Old", "Rename")
    field = page.get_by_label("New title for Old")
    expect(field).to_be_focused()
    field.fill(title)
    field.press("Enter")
    expect(titles(page)).to_have_text([title])
    page.reload()
    expect(titles(page)).to_have_text([title])
    assert page.locator("#history img").count() == 0 and page.title() == "tiny-chat · quintet"
    act(page, title, "Rename")
    page.get_by_label(f"New title for {title}").press("Escape")
    expect(page.get_by_role("button", name=f"Actions for {title}")).to_be_focused()
    expect(titles(page)).to_have_text([title])
    server.scripts.append(Script(answer("Yes.")))
    finished(say(page, "Still the same one?"))
    expect(titles(page)).to_have_text([title])


def test_a_title_may_be_changed_while_an_answer_streams(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("One.")), Script([chunk("Tw")], [chunk("o."), ending(2)])]
    open_page(page, server.url)
    finished(say(page, "Old"))
    message = say(page, "More")
    expect(body(message)).to_have_text("Tw")
    act(page, "Old", "Rename")
    page.get_by_label("New title for Old").fill("New")
    page.get_by_role("button", name="Rename", exact=True).last.click()
    server.go_on.set()
    finished(page.locator(".message.assistant").last)
    expect(titles(page)).to_have_text(["New"])
    page.reload()
    expect(titles(page)).to_have_text(["New"])
    expect(page.locator(".message")).to_have_count(4)


def test_a_deleted_conversation_comes_back_by_undo(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    talk(page, server, "First", "Second")
    act(page, "Second", "Delete")
    expect(page.locator("#toast")).to_contain_text("Deleted “Second”.")
    expect(page.locator("#toast")).to_have_role("status")
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    expect(titles(page)).to_have_text(["First"])
    expect(page.locator("#empty")).to_be_visible()
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text(["Second", "First"])
    expect(body(page.locator(".message.assistant"))).to_have_text("Answer to Second.")
    act(page, "First", "Delete")
    page.locator("#toast").get_by_role("button", name="Close").click()
    expect(page.locator("#toast")).to_be_hidden()
    expect(body(page.locator(".message.assistant"))).to_have_text("Answer to Second.")
    page.reload()
    expect(titles(page)).to_have_text(["Second"])


def test_deleting_while_an_answer_streams_ends_the_answer(page: Page, server: FakeServer) -> None:
    server.scripts += [Script(answer("One.")), Script([chunk("Half an ")], [ending(1)])]
    open_page(page, server.url)
    finished(say(page, "Hi"))
    expect(body(say(page, "More"))).to_have_text("Half an")
    act(page, "Hi", "Delete")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert server.hung_up.wait(60)
    expect(titles(page)).to_have_count(0)
    assert page.evaluate("localStorage.length") == 0


def test_a_new_conversation_ends_the_answer_that_streams_and_keeps_it(page: Page, server: FakeServer) -> None:
    server.scripts += [Script([chunk("Half an ")], [ending(1)]), Script(answer("New."))]
    open_page(page, server.url)
    expect(body(say(page, "Hi"))).to_have_text("Half an")
    begin(page)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".message")).to_have_count(0)
    expect(body(finished(say(page, "Hello")))).to_have_text("New.")
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Hello"]
    page.get_by_role("button", name="Hi", exact=True).click()
    expect(body(finished(page.locator(".message.assistant"), "stopped"))).to_have_text("Half an")


def test_a_reload_within_an_answer_keeps_what_came(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([chunk("Half an ")], [ending(1)]))
    open_page(page, server.url)
    expect(body(say(page, "Hi"))).to_have_text("Half an")
    page.reload()
    message = finished(page.locator(".message.assistant"), "stopped")
    expect(body(message)).to_have_text("Half an")


def test_a_reload_before_the_first_word_gives_the_text_back(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script([chunk()], [ending(1)]))
    open_page(page, server.url)
    say(page, "Hi")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")
    expect(page.locator(".message")).to_have_count(0)


def test_a_second_tab_has_the_same_list_and_sees_changes(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    talk(page, server, "First")
    other = page.context.new_page()
    complaints = watch(other)
    open_page(other, server.url)
    expect(other.locator("#empty")).to_be_visible()  # a tab begins with a new conversation
    other.get_by_role("button", name="First", exact=True).click()
    server.scripts.append(Script(answer("More.")))
    finished(say(page, "Go on"))
    expect(body(other.locator(".message.assistant").last)).to_have_text("More.")
    talk(other, server, "Second")
    expect(titles(page)).to_have_text(["Second", "First"])
    other.get_by_role("button", name="First", exact=True).click()
    expect(other.locator(".message")).to_have_count(4)
    act(page, "First", "Delete")
    expect(other.locator("#empty")).to_be_visible()
    expect(titles(other)).to_have_text(["Second"])
    other.close()
    expect(titles(page)).to_have_text(["Second"])
    assert complaints == []


def test_two_tabs_that_answer_in_one_conversation_lose_neither(page: Page, server: FakeServer) -> None:
    server.scripts.append(Script(answer("One.")))
    open_page(page, server.url)
    finished(say(page, "Hi"))
    other = page.context.new_page()
    open_page(other, server.url)
    other.get_by_role("button", name="Hi", exact=True).click()
    server.scripts.append(Script([chunk("Slow")], [chunk("."), ending(2)]))
    expect(body(say(page, "In the first tab"))).to_have_text("Slow")
    server.scripts.append(Script(answer("Fast.")))
    finished(say(other, "In the second tab"))
    server.go_on.set()
    finished(page.locator(".message.assistant").last)
    expect(titles(page)).to_have_text(["Hi", "Hi"])
    page.reload()
    expect(body(page.locator(".message.assistant").last)).to_have_text("Slow.")
    titles(page).last.click()
    expect(body(page.locator(".message.assistant").last)).to_have_text("Fast.")


def test_the_oldest_turns_go_where_a_conversation_grows_too_long(page: Page, server: FakeServer) -> None:
    page.goto(server.url)
    roles = ["user", "assistant"] * 50
    messages = [{"role": role, "content": f"{at} " + "ä" * 20_000} for at, role in enumerate(roles)]
    kept, size, reason = page.evaluate(SAVE, messages)
    assert size <= 1_000_000 and reason == ""
    assert kept[0]["role"] == "user"
    assert [m["content"] for m in kept] == [m["content"] for m in messages[-len(kept) :]]
    assert len(kept) >= 40


@pytest.mark.parametrize(
    "stored", ["{", "null", "[1]", '{"messages": [{"role": "system", "content": 1}]}', '{"messages": 3}']
)
@pytest.mark.parametrize("suffix", ["#0", ""])
def test_what_is_no_conversation_is_not_shown(page: Page, server: FakeServer, stored: str, suffix: str) -> None:
    server.scripts.append(Script(answer("Hello.")))
    store(page, stored, suffix)
    open_page(page, server.url)
    expect(page.locator("#empty")).to_be_visible()
    expect(titles(page)).to_have_count(0)
    expect(body(finished(say(page, "Hi")))).to_have_text("Hello.")


def test_the_one_conversation_of_earlier_versions_is_in_the_list(page: Page, server: FakeServer) -> None:
    page.goto(server.url)
    old = {"messages": [{"role": "user", "content": "Old"}, {"role": "assistant", "content": "Yes."}], "draft": ""}
    page.evaluate("text => localStorage.setItem(`quintet.conversation:${location.pathname}`, text)", json.dumps(old))
    open_page(page, server.url)
    page.get_by_role("button", name="Old", exact=True).click()
    expect(body(page.locator(".message.assistant"))).to_have_text("Yes.")
    page.reload()
    expect(titles(page)).to_have_text(["Old"])


def test_a_browser_that_keeps_nothing_still_talks_and_says_so(page: Page, server: FakeServer) -> None:
    page.add_init_script(REFUSE)
    open_page(page, server.url)
    talk(page, server, "First")
    expect(page.locator("#notice")).to_contain_text("This conversation is not kept: the browser has no room")
    talk(page, server, "Second")
    expect(page.locator("#notice")).to_be_hidden()  # it was reported once
    expect(page.locator("#history-note")).to_contain_text("not kept")
    page.get_by_role("button", name="First", exact=True).click()  # in the memory of this tab
    expect(body(page.locator(".message.assistant"))).to_have_text("Answer to First.")


def test_a_full_store_keeps_the_old_and_takes_the_new_when_there_is_room(page: Page, server: FakeServer) -> None:
    page.goto(server.url)
    large = json.dumps({"title": "Large", "messages": [{"role": "user", "content": "x" * 999_000}]})
    fill = """text => [0, 1, 2, 3].forEach((at) => localStorage.setItem(
        `quintet.conversation:${location.pathname}#${at}`, text.replace("Large", `Large ${at}`)))"""
    page.evaluate(fill, large)
    open_page(page, server.url)
    server.scripts.append(Script(answer("y" * 5000)))
    finished(say(page, "New"))
    expect(page.locator("#notice")).to_contain_text("4 million characters that this page may keep are used up")
    expect(titles(page)).to_have_text(["New", *(f"Large {at}" for at in range(4))])
    act(page, "Large 3", "Delete")
    page.reload()
    expect(titles(page)).to_have_text(["New", "Large 0", "Large 1", "Large 2"])


def test_a_hostile_store_stays_text(page: Page, server: FakeServer) -> None:
    hostile = {"role": "assistant", "name": "<b>x</b>", "content": "<img src=x>", "state": "done", "stats": "<i>"}
    file = {"name": "<u>f</u>", "text": "<img src=y>"}
    record = {"title": "<b>t</b>", "messages": [{"role": "user", "content": "Hi", "files": [file]}, hostile]}
    store(page, json.dumps(record))
    open_page(page, server.url)
    page.get_by_role("button", name="<b>t</b>", exact=True).click()
    expect(page.locator(".message.assistant")).to_contain_text("<img src=x>")
    page.locator(".file summary").click()
    expect(page.locator(".file pre")).to_have_text("<img src=y>")
    expect(page.locator(":is(#messages, #history) :is(img, b, i, u)")).to_have_count(0)

"""The page on the real server, with the bundled model, and with a small Whisper model: what is spoken becomes text."""

import json

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.helpers.checkpoints.whisper_served import small_whisper
from tests.helpers.servers.serving import Server
from tests.server.page.browser import finished, open_page, open_parameters, say, use_page, watch
from tests.server.page.fake_server import FakeServer

pytestmark = pytest.mark.slow

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = json.dumps([{"name": "get_weather", "description": "Get the weather in a city", "parameters": CITY}])
# a microphone in which a voice speaks: a tone whose loudness goes up and down five times a second
VOICE = """navigator.mediaDevices.getUserMedia = async () => {
    const context = new AudioContext(), out = context.createMediaStreamDestination();
    const loudness = context.createGain(), syllables = context.createOscillator(), tone = context.createOscillator();
    loudness.gain.value = 0.3;
    syllables.frequency.value = 5;
    syllables.connect(loudness.gain);
    tone.frequency.value = 170;
    tone.connect(loudness).connect(out);
    syllables.start();
    tone.start();
    return out.stream;
};"""
FORBIDDEN = "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('no', 'NotAllowedError'); };"


def test_the_page_talks_with_the_bundled_model(browser: Browser) -> None:
    with Server("--device", "cpu") as server:
        context = browser.new_context(viewport={"width": 1200, "height": 800})
        page = context.new_page()
        complaints = watch(page)
        seen = use_page(page, server.url, "What is the capital of France?")
        say(page, "word " * 3000)
        expect(page.locator("#notice")).to_contain_text("which takes at most 1024 tokens")
        page.get_by_label("Message", exact=True).fill("")
        after = finished(say(page, "What is the capital of Italy?")).inner_text()
        open_parameters(page)
        page.get_by_label("Tools, as JSON").fill(WEATHER)
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="New conversation", exact=True).click()
        called = finished(say(page, "What is the weather in Paris?"))
        expect(called.locator(".call pre")).to_have_text('{\n  "city": "Paris"\n}')
        called.get_by_label("Result of get_weather", exact=True).fill("sunny, 21 degrees")
        page.get_by_role("button", name="Send results").click()
        expect(page.locator(".message.assistant")).to_have_count(2)
        told = finished(page.locator(".message.assistant").last).inner_text()
        context.close()
    assert "The weather in Paris: sunny, 21 degrees." in told
    assert "Paris" in seen.answer and "Rome" in after
    assert seen.tokens_after > seen.tokens_before
    assert [complaint for complaint in complaints if "status of 400" not in complaint] == []


def test_what_is_spoken_becomes_text(browser: Browser) -> None:
    with Server(str(small_whisper()), "--device", "cpu", "--dtype", "float32", "--max-model-len", "64") as server:
        context = browser.new_context()
        page = context.new_page()
        complaints = watch(page)
        page.add_init_script(VOICE)
        open_page(page, server.url)
        page.get_by_label("Message", exact=True).fill("before")
        page.get_by_role("button", name="Record speech").click()
        page.get_by_role("button", name="Stop recording").wait_for()
        page.wait_for_timeout(1500)  # of speech
        page.get_by_role("button", name="Stop recording").click()
        expect(page.get_by_role("button", name="Record speech")).to_be_enabled()
        text = page.get_by_label("Message", exact=True).input_value()
        notice = page.locator("#notice").inner_text()
        passes = server.metrics()["quintet:encoder_passes_total"]
        context.close()
    assert text.startswith("before ") and len(text) > len("before ") and text.isascii(), (text, notice)
    assert passes >= 1
    assert complaints == []


def test_a_forbidden_microphone_is_reported(page: Page, server: FakeServer) -> None:
    page.add_init_script(FORBIDDEN)

    def marked(route: Route) -> None:
        index = route.fetch()
        route.fulfill(response=index, body=index.text().replace("<body>", "<body data-transcribes>"))

    page.route(server.url, marked)
    open_page(page, server.url)
    page.get_by_role("button", name="Record speech").click()
    expect(page.locator("#notice")).to_contain_text("does not let the page use a microphone")
    expect(page.get_by_role("button", name="Record speech")).to_be_enabled()


def test_other_models_have_no_such_button(page: Page, server: FakeServer) -> None:
    open_page(page, server.url)
    expect(page.get_by_role("button", name="Record speech")).to_have_count(0)

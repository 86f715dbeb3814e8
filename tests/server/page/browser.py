"""Drives the page in a browser, against any server that has it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGS = [
    "--no-sandbox",  # tests may run as root, where Chromium's sandbox does not
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60_000  # ms


def find_browser() -> str | None:
    """The path of a Chromium, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser(path: str) -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS, timeout=PATIENCE)
        try:
            yield browser
        finally:
            browser.close()


@dataclass(frozen=True)
class Used:
    """What was seen while the page was used."""

    answer: str
    tokens_before: int  # as the panel counted what the server wrote
    tokens_after: int


def watch(page: Page) -> list[str]:
    """A list that fills with whatever the page complains of: errors, warnings, breaches of its policy."""
    complaints: list[str] = []
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("console", lambda m: complaints.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
    return complaints


def open_page(page: Page, url: str) -> None:
    """Opens the page and waits until it knows a model."""
    page.goto(url)
    expect(page.get_by_label("Model", exact=True)).to_be_enabled()


def open_parameters(page: Page) -> None:
    """Unfolds the parameters form."""
    if not page.locator("#settings").evaluate("element => element.open"):
        page.get_by_role("heading", name="Parameters").click()


def say(page: Page, text: str) -> Locator:
    """Sends a message; the answer's element, which may still be growing."""
    field = page.get_by_label("Message", exact=True)
    field.fill(text)
    field.press("Enter")
    return page.locator(".message.assistant").last


def begin(page: Page) -> None:
    """Begins a new conversation."""
    page.get_by_role("button", name="New conversation", exact=True).click()


def body(message: Locator) -> Locator:
    return message.locator(".body")


def finished(answer: Locator, state: str = "done") -> Locator:
    expect(answer).to_have_attribute("data-state", state)
    return answer


def use_page(page: Page, url: str, text: str = "Say something.") -> Used:
    """Types a message, waits for the streamed answer, and sees the panel move."""
    open_page(page, url)
    if not page.locator("#live").evaluate("element => element.open"):
        page.get_by_role("heading", name="Live").click()
    generated = page.locator("#generated")
    expect(generated).not_to_have_text("–")
    before, line = generated.inner_text(), page.locator("#line").get_attribute("points") or ""
    answer = finished(say(page, text))
    expect(generated).not_to_have_text(before)
    expect(page.locator("#line")).not_to_have_attribute("points", line)
    body = answer.locator(".body").inner_text()
    return Used(body, _number(before), _number(generated.inner_text()))


def _number(text: str) -> int:
    return int(text.replace(",", ""))

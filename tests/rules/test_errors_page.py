"""docs/errors.md lists every error code of the server and the router, each with cause and remedy."""

from scripts import errors


def test_every_code_has_a_cause_and_a_remedy() -> None:
    described = errors.SERVER | errors.ROUTER
    assert set(errors.statuses()) == set(described)
    assert [code for code, texts in described.items() if not all(text.endswith(".") for text in texts)] == []


def test_the_page_is_current() -> None:
    assert errors.FILE.read_text(encoding="utf-8") == errors.page(), "run .venv/bin/python scripts/errors.py"

"""docs/reference/ says what the declarations of commands, settings, variables and metrics say."""

import pytest

from quintet.cli.main import COMMANDS
from scripts import reference
from scripts.reference_pages import http_page, markdown

PAGES = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    text = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert text == PAGES[name], "run .venv/bin/python scripts/reference.py"


def test_the_folder_has_no_other_page() -> None:
    assert sorted(path.name for path in reference.FOLDER.iterdir()) == sorted(PAGES)


def test_every_command_has_a_section_with_its_flags() -> None:
    page = PAGES["cli.md"]
    assert [name for name in COMMANDS if f"\n## quintet {name}\n" not in page] == []
    assert "`--port N`" in page and "`--[no-]headless`" in page and "`--max-model-len" not in page


def test_a_cell_holds_any_text() -> None:
    assert markdown.cell("a|b <c> *.bin `x<y>`") == "a\\|b &lt;c> \\*.bin `x<y>`"


def test_every_route_that_a_flag_adds_names_it() -> None:
    page = PAGES["http.md"]
    assert "`POST /v1/chat/completions` | Answers a conversation. | [ChatRequest](#chatrequest)" in page
    assert set(http_page.FLAGS) <= set(http_page.schema()["paths"])
    assert "| `POST /sleep` |" in page and "With `--enable-sleep-mode`." in page

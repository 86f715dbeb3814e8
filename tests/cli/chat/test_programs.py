"""Programs as tools: words and no shell, JSON on standard input, bounds on time and output."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quintet.cli.chat.program_tools import MAX_OUTPUT, ProgramTool
from quintet.cli.chat.tool import ToolInvocation, run_tool
from quintet.cli.chat.tool_files import read_tools

TEXT = {"type": "object", "properties": {"text": {"type": "string"}, "count": {}}, "required": ["text"]}


def python(code: str, *words: str, timeout: float = 30.0) -> ProgramTool:
    return ProgramTool("it", "", TEXT, (sys.executable, "-c", code, *words), timeout)


def said(tool: ProgramTool, **arguments: Any) -> str:
    return run_tool({"it": tool}, ToolInvocation("it", json.dumps(arguments)))


def test_arguments_come_as_json_and_in_their_places() -> None:
    show = python("import sys; print(sys.argv[1:], sys.stdin.read())", "a={text}", "--", "{text}", "{count}", "{other}")
    hostile = "x; rm -rf $HOME `id` {count} 'ä'"
    assert (
        said(show, text=hostile)
        == f"{[f'a={hostile}', '--', hostile, '{other}']} {json.dumps({'text': hostile}, ensure_ascii=False)}"
    )
    assert "'-n', '7', '{other}'" in said(show, text="-n", count=7)


def test_a_word_of_the_models_is_no_option() -> None:
    tool = python("print(1)", "{text}")
    assert said(tool, text="--delete") == "error: ValueError: text may not begin with '-'"
    assert said(tool, text="a\0b") == "error: ValueError: an argument of a program holds no NUL"
    assert said(tool) == "error: ValueError: text must be given"


def test_a_failure_comes_with_what_was_written() -> None:
    failing = python("import sys; print('one', flush=True); sys.exit('two')")
    assert said(failing, text="").endswith("ended with status 1\none\ntwo")
    missing = ProgramTool("it", "", {}, ("/nowhere/program",))
    assert said(missing).startswith("error: FileNotFoundError")


def test_a_program_ends_in_time_with_all_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid}; echo begun; wait"
    tool = ProgramTool("it", "", {}, ("sh", "-c", script), timeout=1.0)
    assert "took longer than 1 seconds\nbegun" in said(tool)
    while _runs(Path(f"/proc/{pid.read_text().strip()}/stat")):
        time.sleep(0.01)


def test_what_a_program_left_running_ends_in_time_though_the_program_has_ended(tmp_path: Path) -> None:
    """It holds the output open, so that nobody knows whether more comes."""
    script = f"sleep 600 & echo $! > {tmp_path}/child"
    assert "took longer than 1 seconds" in said(ProgramTool("it", "", {}, ("sh", "-c", script), timeout=1.0))
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "stat"
    while _runs(child):
        time.sleep(0.01)


def _runs(stat: Path) -> bool:
    """Whether it is there, and more than a zombie."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_that_closes_its_output_and_stays_ends_too() -> None:
    tool = ProgramTool("it", "", {}, ("sh", "-c", "exec >&- 2>&-; sleep 600"), timeout=1.0)
    assert "took longer than 1 seconds" in said(tool)


def test_a_flood_is_cut_off() -> None:
    result = said(python("while True: print('x' * 1000)"), text="")
    assert f"wrote more than {MAX_OUTPUT} bytes" in result and len(result) < 20_000


@pytest.mark.parametrize("kind", ["json", "yaml", "toml"])
def test_a_file_names_programs(tmp_path: Path, kind: str) -> None:
    command = json.dumps([sys.executable, "-c", "import sys; print(sys.argv[1])", "{text}"])
    written = {
        "json": f'{{"tools": [{{"name": "say", "command": {command}, "parameters": {json.dumps(TEXT)}}}]}}',
        "yaml": f"- name: say\n  description: Says it\n  command: {command}\n  parameters: {json.dumps(TEXT)}\n",
        "toml": f"[[tools]]\nname = 'say'\ncommand = {command}\nparameters.properties.text.type = 'string'\n",
    }[kind]
    if kind == "toml":
        pytest.importorskip("tomllib")
    file = tmp_path / f"tools.{kind}"
    file.write_text(written)
    assert run_tool(read_tools(str(file)), ToolInvocation("say", '{"text": "hello"}')) == "hello"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "f", "command": "rm -rf {x}"}, r"tools\[0\].command must be a list of words; no shell reads it"),
        ({"name": "f", "command": []}, "must be a list of words"),
        ({"name": "f", "command": ["{x}"]}, "a call may not choose it"),
        ({"name": "f g", "command": ["x"]}, "letters, digits"),
        ({"name": "f", "command": ["x"], "timeout": 0}, "must be seconds"),
        ({"name": "f", "command": ["x"], "shell": True}, "'shell'"),
        (3, r"tools\[0\].name"),
    ],
)
def test_an_entry_that_is_wrong_is_named(tmp_path: Path, entry: Any, says: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match=says):
        read_tools(str(file))


def test_a_file_of_another_kind_or_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tools.sh").write_text("echo")
    (tmp_path / "big.json").write_bytes(b" " * (2**20 + 1))
    for name, says in (("tools.sh", "must be a .py"), ("big.json", "is the most"), ("none.py", os.strerror(2))):
        with pytest.raises(ValueError, match=says):
            read_tools(str(tmp_path / name))

"""`quintet embed` and `quintet rerank`: files in and out, and what is said of wrong ones."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from quintet.cli import main as cli
from tests.e2e.pooling.test_served import SIZES, TEXTS, saved, vector


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    torch.manual_seed(0)
    return saved(BertModel(BertConfig(**SIZES)), tmp_path_factory.mktemp("bert"))


def flags(bert: tuple[Path, Any, Any]) -> list[str]:
    return ["--model", str(bert[0]), "--device", "cpu", "--pooler-config.pooling_type", "MEAN"]


def test_texts_become_lines(bert: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["embed", *TEXTS[:2], *flags(bert)]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [each["text"] for each in lines] == TEXTS[:2] and "2 texts in" in err
    for each in lines:
        np.testing.assert_allclose(each["embedding"], vector(bert, each["text"]), atol=2e-6)


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl"])
def test_a_file_becomes_an_array(bert: tuple[Path, Any, Any], tmp_path: Path, name: str) -> None:
    written = TEXTS if name == "in.txt" else [json.dumps(TEXTS[0]), *(json.dumps({"t": text}) for text in TEXTS[1:])]
    (tmp_path / name).write_text("\n\n".join(written) + "\n")
    target = tmp_path / "out.npy"
    words = ["embed", "-i", str(tmp_path / name), "-o", str(target), "--field", "t", "-q", *flags(bert)]
    assert cli.main(words) == 0
    np.testing.assert_allclose(np.load(target), [vector(bert, text) for text in TEXTS], atol=2e-6)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([name, "out.npy"])


def test_objects_keep_what_else_they_hold(bert: tuple[Path, Any, Any], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": 7, "text": "cat " * 90}) + "\n")
    assert cli.main(["embed", "-i", str(source), "-o", str(target), *flags(bert)]) == 0
    [found] = map(json.loads, target.read_text().splitlines())
    assert found["id"] == 7 and len(found["embedding"]) == 48


@pytest.mark.parametrize("words", [[], ["-"]], ids=["nothing", "-"])
def test_texts_that_were_cut_are_counted(
    words: list[str], bert: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of standard input, which is read where no text is given, or -."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n" + b"cat " * 90)))
    assert cli.main(["embed", *flags(bert), "--max-model-len", "48", *words]) == 0
    assert "1 have 48 tokens, or were cut to that" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"a"\n{"text": 3}\n', "in.jsonl, line 2 has no text"),
        ('{"text": "a"}\nnot json\n', "in.jsonl, line 2 is not JSON"),
        ("\n", "there are no texts"),
        ("[1]\n", "line 1 must be text or an object"),
    ],
)
def test_what_is_wrong_with_a_file(
    bert: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    target = tmp_path / "out.jsonl"
    assert cli.main(["embed", "-i", str(tmp_path / "in.jsonl"), "-o", str(target), *flags(bert)]) == 1
    assert message in capsys.readouterr().err and not target.exists() and not Path(f"{target}.part").exists()


@pytest.mark.parametrize("words", [["embed", "-i"], ["rerank", "a cat"]])
def test_a_file_that_is_not_there(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, str(tmp_path / "none.txt"), "--model", "never-looked-at"]) == 1
    said = capsys.readouterr().err
    assert "there is no file" in said and "none.txt" in said and "Errno" not in said


def test_empty_lines_are_counted(
    bert: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of an array are those of the other lines."""
    (tmp_path / "in.txt").write_text(f"{TEXTS[0]}\n\n  \n{TEXTS[1]}\n\n")
    target = tmp_path / "out.npy"
    assert cli.main(["embed", "-i", str(tmp_path / "in.txt"), "-o", str(target), *flags(bert)]) == 0
    assert len(np.load(target)) == 2 and "2 empty lines were left out" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["generate", "a cat"], ["generate", "--chat", "a cat"]])
def test_commands_that_want_text_name_those_of_numbers(
    bert: tuple[Path, Any, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, *flags(bert)]) == 1
    said = capsys.readouterr().err
    assert "gives numbers (embed, token_embed), and no text" in said and "`quintet embed`" in said


def test_documents_are_ranked(bert: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    words = ["rerank", "a cat", str(tmp_path / "in.txt"), "-q", *flags(bert)]
    assert cli.main([*words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = {text: float(vector(bert, "a cat") @ vector(bert, text)) for text in TEXTS}
    assert [each["text"] for each in found] == sorted(TEXTS, key=lambda text: -wanted[text])
    for each in found:
        assert (
            each["score"] == pytest.approx(wanted[each["text"]], abs=2e-6) and TEXTS[each["line"] - 1] == each["text"]
        )
    assert cli.main([*words, "--top-n", "1"]) == 0
    assert capsys.readouterr().out == f"{found[0]['score']:.4f}  {found[0]['text']}\n"
    with pytest.raises(SystemExit):
        cli.main([*words, "--top-n", "0"])
    assert "whole number from 1" in capsys.readouterr().err

"""`quintet verify`: engines against themselves, transformers, a server, a trainer's file, and weights that differ."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quintet
from quintet.api.llm import LLM
from quintet.cli import main as cli
from quintet.config import EngineConfig
from quintet.verification.report import CLOSE, DIFFERENT, EQUAL, NOT_RUN
from quintet.verification.scores import Limits
from quintet.verification.verify import VerifySettings, verify_itself
from tests.helpers.servers.serving import Server

BUNDLED = Path(quintet.__file__).parent / "bundled"
SMALL = ("--device", "cpu", "--kv-cache-memory-bytes", "64M")
PROMPTS = ("Once upon a time there was a little dog who lived in a house near the river", "2 + 2 =")
TIGHT = Limits(1e-3, 1e-2)  # of float32


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with one weight changed."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(BUNDLED, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name] * 0.5}, folder / "model.safetensors")
    return str(folder)


def opened(**changes: Any) -> LLM:
    return LLM("bundled", device="cpu", dtype="float32", kv_cache_memory_bytes="64M", use_tqdm=False, **changes)


def outcomes(report: Any) -> dict[str, str]:
    return {check.name: check.outcome for check in report.checks}


def test_an_engine_is_equal_to_itself_and_close_to_transformers() -> None:
    settings = VerifySettings(PROMPTS, 6, TIGHT)
    report = verify_itself(opened, settings, EngineConfig("bundled", device="cpu"))
    assert outcomes(report) == {
        "batched and alone": EQUAL, "cached and not": EQUAL, "as a prompt and as output": EQUAL,
        "in chunks and whole": EQUAL, "transformers in float32": CLOSE,
    }  # fmt: skip
    assert report.passed
    reference = report.checks[-1].comparison
    assert reference is not None and 0 < reference.max < 1e-2 and reference.likeliest_differ == 0


def test_other_weights_are_found_and_what_cannot_run_says_why(other: str) -> None:
    def without_cache(**changes: Any) -> LLM:
        return opened(enable_prefix_caching=False, enable_chunked_prefill=False, **changes)

    report = verify_itself(without_cache, VerifySettings(PROMPTS, 6, TIGHT), EngineConfig(other, device="cpu"))
    found = outcomes(report)
    assert (found["cached and not"], found["in chunks and whole"]) == (NOT_RUN, NOT_RUN)
    assert found["transformers in float32"] == DIFFERENT and not report.passed
    assert "prefix caching is off" in str(report) and "chunked prefill is off" in str(report)


def test_a_server_is_compared_and_another_models_server_differs(
    other: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    with Server("bundled", *SMALL) as server:
        words = ["verify", "--against", server.url, "--prompts-file", str(prompts), "--max-tokens", "6", *SMALL]
        assert cli.main([*words, "--json", "--mean-tolerance", "0", "--max-tolerance", "0"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert [check["outcome"] for check in report["checks"]] == [EQUAL] * 4
        assert cli.main([*words, "--model", other, "--mean-tolerance", "0.01"]) == 1
        out = capsys.readouterr().out
        assert "as a prompt, here and there: different" in out and " nats, bias " in out and out.endswith("failed\n")
        assert cli.main([*words, "--against-model", "bundle"]) == 1
        assert "did you mean 'bundled'" in capsys.readouterr().err


def test_a_trainers_file_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    ids = list(range(20, 40))
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    values = [float(rows[at, ids[at + 1]]) for at in range(len(ids) - 1)]
    file = tmp_path / "scores.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": ids[:5], "token_ids": ids[5:], "logprobs": values[4:]}))
    words = ["verify", "--logprobs", str(file), "--dtype", "float32", "--max-tolerance", "0.01", *SMALL]
    assert cli.main(words) == 0
    assert "log-probabilities: close, 15 positions" in capsys.readouterr().out
    values[10] -= 0.5
    file.write_text(json.dumps({"prompt_token_ids": ids[:5], "token_ids": ids[5:], "logprobs": values[4:]}))
    assert cli.main(words) == 1
    assert "sequence 1, position 11, token 31" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "http://127.0.0.1:9", "--logprobs", "x"], "--against and --logprobs; give one of them"),
        (["--against", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["--against-model", "x"], "mean nothing without --against"),
        (["--logprobs", "/nowhere.jsonl", *SMALL], "is not there; give a file"),
        (["--mean-tolerance", "-1"], "are at least 0"),
        (["--max-tokens", "2000", *SMALL], "leaves no room in"),
    ],
)
def test_errors_say_what_to_do(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", *words]) == 1
    assert message in capsys.readouterr().err

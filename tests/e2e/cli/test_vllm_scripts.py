"""Scripts as vLLM's documentation has them run with the import changed: examples/vllm-scripts."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "examples" / "vllm-scripts"
SAYS = {  # what of each script's output can be only if it did what it shows
    "generate": ["Prompt: 'The capital of France is', generated: ' Paris"],
    "chat": ["Answer: '", "<|assistant|>"],
    "engine": [
        "RequestOutput(request_id='0'",
        "RequestOutput(request_id='1'",
        "RequestOutput(request_id='2'",
        "index=1",
    ],
    "streaming": ["'In a galaxy far, far away':", "\nfinished"],
    "metrics": ["vllm:num_requests_running (gauge) = 0", "vllm:generation_tokens (counter) = 3", "+Inf: "],
    "prefix_caching": ["\n0 of 278 tokens", "\n272 of 278"],
}
MORE = {"generate": ["--max_tokens", "8", "--temperature", "0"], "chat": ["--max-tokens", "8"]}


def test_every_script_is_run() -> None:
    assert {file.stem for file in SCRIPTS.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_a_script_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--max_model_len", "512", "--block-size", "16", *MORE.get(name, [])])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    out = "\n" + capsys.readouterr().out
    assert [each for each in SAYS[name] if each not in out] == [], out

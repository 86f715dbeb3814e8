"""What type checkers and editors see of LLM: every setting by name, with its type and default, and no other."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quintet import LLM, AsyncLLM
from quintet.config import EngineConfig, setting_fields
from scripts import typed_arguments

ROOT = Path(__file__).parents[2]
SAMPLE = """
import torch
from quintet import LLM, AsyncLLM, RequestOutput, SamplingParams
llm = LLM("bundled", dtype=torch.bfloat16, kv_cache_memory_bytes="2G", block_size=16, hf_overrides={"a": 1})
LLM("a", speculative_config={"method": "ngram", "num_speculative_tokens": 4}, cudagraph_capture_sizes=[1, 2])
reveal_type(llm.generate("x", SamplingParams(max_tokens=1)))
reveal_type(next(llm.stream("x")).outputs[0].text)
AsyncLLM(max_model_len="auto", use_tqdm=True)
LLM("bundled", max_modle_len=3)
AsyncLLM(enforce_eager="no")
"""
SAID = [  # of line 9, the note that says where is left out
    'sample.py:6: note: Revealed type is "list[quintet.outputs.RequestOutput]"',
    'sample.py:7: note: Revealed type is "str"',
    'sample.py:9: error: Unexpected keyword argument "max_modle_len" for "LLM"; did you mean "max_model_len"?',
    'sample.py:10: error: Argument "enforce_eager" to "AsyncLLM" has incompatible type "str"; expected "bool"',
]


def test_the_stub_is_made_of_the_settings() -> None:
    assert typed_arguments.FILE.read_text() == typed_arguments.stub(), "run scripts/typed_arguments.py"


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_stub_names_what_is_taken(kind: type) -> None:
    text = typed_arguments.stub().split(f"class {kind.__name__}Arguments")[1].split("\nclass ")[0]
    typed = {line.split(":")[0].strip() for line in text.splitlines() if line.startswith("        ")}
    aliases = {alias for each in setting_fields(EngineConfig) for alias in each.metadata["aliases"]}
    assert typed - {"self,", "*,"} == {*inspect.signature(kind).parameters, *aliases}


@pytest.mark.slow
def test_a_checker_knows_keywords_and_results(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text(SAMPLE)
    words = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    done = subprocess.run([*words, str(sample)], capture_output=True, text=True, cwd=ROOT, timeout=240)
    said = [
        line[line.index("sample.py") :]
        for line in done.stdout.splitlines()
        if "sample.py" in line and "defined in" not in line
    ]
    assert [re.sub(r"builtins\.|  \[.*\]", "", line) for line in said] == SAID, done.stdout + done.stderr

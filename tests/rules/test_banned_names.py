"""Names that have a home: ruff refuses each of them elsewhere, and lets it pass at home."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def codes(text: str, path: str) -> set[str]:
    """The rules that ruff sees broken by `text`, were it the file `path`."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    run = subprocess.run(
        [*command, f"--stdin-filename={path}", "-"], input=text, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode in (0, 1), run.stderr
    return {line.split()[1] for line in run.stdout.splitlines() if line.startswith(path)}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n\ntorch.cuda.synchronize()\n",
        "from torch import cuda\n\ncuda.synchronize()\n",
        "import torch\n\nx = torch.xpu.device_count()\n",
        "import torch\n\nx = torch.version.hip\n",
        "import torch\n\nx = torch.backends.cudnn.enabled\n",
        "import os\n\nx = os.environ['A']\n",
        "from os import environ\n\nx = environ['A']\n",
        "import os\n\nx = os.getenv('A')\n",
        "import os\n\nos.putenv('A', 'B')\n",
        "import pickle\n\nx = pickle.dumps(1)\n",
        "import torch\n\nx = torch.load('file')\n",
        "from quintet.chat.messages import render_chat\n\nx = render_chat\n",
    ],
)
def test_name_is_refused_outside_its_home(text: str) -> None:
    assert "TID251" in codes(text, "quintet/engine/sample.py")


def test_text_is_not_run_as_code() -> None:
    assert "S307" in codes("x = eval('1')\n", "quintet/engine/sample.py")
    assert "S102" in codes("exec('1')\n", "quintet/engine/sample.py")


def test_home_may_use_its_names() -> None:
    assert codes("import os\n\nx = os.environ['A']\n", "quintet/config/schema/environment.py") == set()
    assert codes("import torch\n\nx = torch.cuda.device_count()\n", "quintet/platforms/cuda/platform.py") == set()
    assert codes("import torch\n\nx = torch.xpu.device_count()\n", "quintet/platforms/gpu/deep/streams.py") == set()


@pytest.mark.parametrize("library", ["triton", "flashinfer", "jax", "torchax", "pynvml", "aiter"])
def test_library_that_may_be_missing_is_not_imported_at_the_top(library: str) -> None:
    text = f"import {library}\n\nx = {library}.y\n"
    assert "TID253" in codes(text, "quintet/platforms/cuda/platform.py")
    assert "TID253" in codes(text, "quintet/layers/sample.py")
    assert codes(text, "quintet/platforms/cuda/kernels/sample.py") == set()


def test_seven_parameters_are_refused() -> None:
    text = "def f(a, b, c, d, e, f, g):\n    return a\n"
    assert "PLR0913" in codes(text, "quintet/engine/sample.py")
    assert codes("def f(a, b, c, d, e, f):\n    return a\n", "quintet/engine/sample.py") == set()


def test_method_counts_its_parameters_without_self() -> None:
    text = "class A:\n    def f(self, a, b, c, d, e, f):\n        return a\n"
    assert codes(text, "quintet/engine/sample.py") == set()


def test_many_branches_are_refused() -> None:
    text = "def f(x):\n" + "".join(f"    if x == {i}:\n        return {i * 7}\n" for i in range(13)) + "    return 0\n"
    assert "C901" in codes(text, "quintet/engine/sample.py")

"""Holds GGUF files that `quintet quantize` wrote against transformers' reading of them, and llama.cpp's logits.

    python scripts/check_gguf.py PYTHON_WITH_LLAMA_CPP FILE ...        # here: torch, transformers, gguf

transformers dequantizes by the package gguf; llama.cpp computes with activations of 8 bits where weights are of blocks.
Texts are cut into tokens by llama.cpp as by the original's tokenizer, if its folder stands before the files.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

IDS = list(range(3, 67))
TEXTS = ["What is the capital of France?", "3 + 40 = 43\nCount: 1, 2,  3!", "naïve café, 你好 😀\n\n\tend  "]
THEIRS = """
import json, sys
import numpy as np
from llama_cpp import Llama
llama = Llama(sys.argv[1], n_ctx=128, logits_all=True, verbose=False)
llama.eval(json.loads(sys.argv[2]))
np.save(sys.argv[3], llama.scores[: llama.n_tokens])
print(json.dumps([llama.tokenize(text.encode(), add_bos=True, special=True) for text in json.loads(sys.argv[4])]))
"""


@torch.no_grad()
def check(python: str, file: Path, folder: Path | None) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as home:
        to = f"{home}/logits.npy"
        command = [python, "-c", THEIRS, str(file), json.dumps(IDS), to, json.dumps(TEXTS)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"{file.name}: llama.cpp refuses it: {done.stderr.strip().splitlines()[-1]}"
        theirs = torch.from_numpy(np.load(to))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    want = model(torch.tensor([IDS])).logits[0]
    off = (theirs[:, : want.shape[1]] - want).abs()
    kl = (want.log_softmax(-1).exp() * (want.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1).mean()
    said = f"{file.name}: logits off by {off.max() / want.std():.3g} of their std at most, KL {kl:.2g} nats"
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        same = [tokenizer.encode(text) == ids for text, ids in zip(TEXTS, json.loads(done.stdout), strict=True)]
        said += f", {sum(same)} of {len(same)} texts are the same tokens"
    return said


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    python, *paths = sys.argv[1:]
    folder = Path(paths.pop(0)) if Path(paths[0]).is_dir() else None
    for path in paths:
        print(check(python, Path(path), folder), flush=True)

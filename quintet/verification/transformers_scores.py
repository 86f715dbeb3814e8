"""Scores of transformers' code in float32 on the CPU: the reference that a trainer computes with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from quintet.config import EngineConfig
from quintet.hub.resolve import resolve_model
from quintet.verification.scores import Likeliest, SequenceScores

ROWS = 64  # positions whose logits are normalized at a time
FLOAT32 = 4  # bytes


class NoReference(Exception):
    """The reason why transformers does not run a model."""


def score(config: EngineConfig, sequences: Sequence[SequenceScores]) -> list[SequenceScores]:
    """Returns the scores of the sequences by transformers' model of the same files. NoReference says why it has
    none."""
    model = _load(resolve_model(config))
    try:
        return [_score(model, each) for each in sequences]
    except Exception as error:  # of transformers' code, of any kind
        raise NoReference(f"transformers' code failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Returns the type and the beginning of an error's text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _load(path: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_log

    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    verbosity = transformers_log.get_verbosity()
    transformers_log.set_verbosity_error()
    transformers_log.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
        _check_memory(config)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True, attn_implementation="eager",
            **options,
        )  # fmt: skip
        return model.float().eval()
    except NoReference:
        raise
    except Exception as error:  # of transformers' code, of any kind
        raise NoReference(f"transformers does not load it: {one_line(error)}") from error
    finally:
        transformers_log.set_verbosity(verbosity)
        transformers_log.enable_progress_bar()


def _check_memory(config: Any) -> None:
    """NoReference if the weights in float32 do not fit."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    needed = FLOAT32 * sum(each.numel() for each in model.parameters())
    free = psutil.virtual_memory().available
    if needed > free:
        raise NoReference(
            f"its weights are {needed / 2**30:.1f} GiB in float32, and {free / 2**30:.1f} GiB of memory are free; "
            "give a smaller model, or --reference none"
        )


@torch.no_grad()
def _score(model: Any, given: SequenceScores) -> SequenceScores:
    ids = torch.tensor([list(given.ids)])
    logits = model(ids, use_cache=False).logits[0]
    logprobs: list[float | None] = [None]
    likeliest: list[Likeliest | None] = [None]
    for first in range(0, len(given.ids) - 1, ROWS):
        following = ids[0, first + 1 : first + 1 + ROWS]
        rows = logits[first : first + len(following)].float().log_softmax(-1)
        logprobs += rows.gather(1, following[:, None])[:, 0].tolist()
        values, tokens = rows.max(-1)
        likeliest += [Likeliest(*each) for each in zip(tokens.tolist(), values.tolist(), strict=True)]
    return SequenceScores(given.ids, given.num_prompt, logprobs, likeliest, given.drawn)

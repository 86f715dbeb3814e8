"""Tries all causal models, encoders and encoder-decoders of transformers by default configs, each in a process."""

import contextlib
import json
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from quintet.api.trial.small_copy import one_line
from quintet.api.trial.trial import NO_COPY, NOT_RUN, REFUSED, TrialResult, try_model
from quintet.config import EngineConfig

MAX_ANSWER = 2**16  # bytes of a result
GRACE = 10.0  # seconds for a process to end after its result
_PRELOADED = ["quintet.api.trial.all_types", "quintet.api.llm", "transformers.modeling_utils"]


_QWEN4_EXP: Mapping[str, Any] = {
    "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
    "indexer_compress_ratio": 16, "ple_layer_ids": [1], "eos_token_id": 2,
}  # fmt: skip
# what default configs lack, and no model of the type is without
COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "lfm2_moe": {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2},
    "qwen4_exp": {"text_config": {"model_type": "qwen4_exp_text", **_QWEN4_EXP}},
    "qwen4_exp_text": _QWEN4_EXP,
}


def tried_types() -> list[str]:
    """Returns the model types with a causal model, an encoder or an encoder-decoder in transformers, sorted."""
    from transformers.models.auto import modeling_auto as auto

    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return sorted({*causal, *masked, *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES})


def try_all(
    limit: float, total: float, show: Callable[[TrialResult], None], kinds: Iterable[str] | None = None
) -> list[TrialResult]:
    """Tries `kinds`, all of them if None: one process at a time, each at most `limit` seconds; types that would
    begin after `total` seconds are "not run". ValueError if a time is not above 0."""
    if not (limit > 0 and total > 0):
        raise ValueError(f"limit and total are {limit} and {total} seconds; both must be above 0")
    context: Any = _context()
    end, results = time.monotonic() + total, []
    for kind in tried_types() if kinds is None else kinds:
        left = end - time.monotonic()
        if left <= 0:
            results.append(TrialResult(kind, kind, NOT_RUN, None, f"the {total:g} s of all types were over"))
        else:
            results.append(_tried(context, kind, min(limit, left)))
        show(results[-1])
    return results


def _context() -> Any:
    """Processes that begin as copies of one that has imported torch and transformers, where the system can do that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _tried(context: Any, kind: str, limit: float) -> TrialResult:
    """Runs one type in a process, which is killed after `limit` seconds."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try_type, args=(kind, sender), daemon=False)
    process.start()
    sender.close()
    reason = f"its process was killed after {limit:.0f} s"
    try:
        if receiver.poll(limit):
            result = TrialResult(**json.loads(receiver.recv_bytes(MAX_ANSWER)))
            process.join(GRACE)
            return result
    except EOFError:
        process.join()
        reason = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    return TrialResult(kind, kind, REFUSED, None, reason)


def _try_type(kind: str, sender: Connection) -> None:
    """Tries a type's default config, in a process of its own. Its output goes nowhere."""
    torch.set_num_threads(1)
    entries = {"model_type": kind, **COMPLETED.get(kind, {})}
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="quintet-try-") as folder, Path(os.devnull).open("w") as nowhere:
        (Path(folder) / "config.json").write_text(json.dumps(entries), encoding="utf-8")
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            try:
                result = try_model(EngineConfig(model=folder)).to_dict()
            except Exception as error:  # of transformers' code, of any kind
                result = TrialResult(kind, kind, NO_COPY, None, one_line(error).replace(folder, kind)).to_dict()
    sender.send_bytes(json.dumps({**result, "model": kind}).encode())

"""A whole engine that is run for numbers: texts go in, in some order and beside each other, and arrays come out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quintet.chat.prompts import Prompt
from quintet.conformance.check import ContractViolation, NotSupported, require
from quintet.conformance.harness.reference_model import Tiny
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import dtype_name, plain_dtype, quiet_logs
from quintet.engine.input_processor import InputProcessor, ModelLimits
from quintet.engine.pooling.heads import FloatRows
from quintet.engine.startup import launch, prepare
from quintet.pooling_params import PoolingParams

MAX_STEPS = 500  # many times what the texts need
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "skip_tokenizer_init": True}


class PoolingEngine:
    """An engine on the platform under test that answers with numbers."""

    def __init__(self, subject: Subject, tiny: Tiny, **settings: Any) -> None:
        """`settings`: fields of EngineConfig. Lacking, if no engine can be made of them here."""
        plain: dict[str, Any] = {"dtype": dtype_name(plain_dtype(subject.facts)), "runner": "pooling"}
        if subject.facts.static_shapes:  # each size is compiled
            plain["max_num_seqs"] = 4
        config = subject.config(model=str(tiny.folder), **{**SETTINGS, **plain, **settings})
        with quiet_logs():
            try:
                prepared = prepare(config, subject.chosen)
            except ValueError as reasons:
                raise NotSupported(str(reasons)) from None
            self._engine = launch(prepared, progress=False)
        bounds = ModelLimits(
            prepared.vocab_size,
            prepared.memory_plan.max_model_len,
            config.max_logprobs,
            pooling=prepared.pooling_bounds,
        )
        self._admission = InputProcessor(bounds, None, frozenset(), seed=0)
        self._count = 0

    def pool(
        self, texts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None, **params: Any
    ) -> list[FloatRows]:
        """Returns the numbers of texts sent together, [n] or [tokens, n] each; `params`: of PoolingParams."""
        asked, waiting, found = PoolingParams(**params), dict[str, int](), dict[int, FloatRows]()
        for place, ids in enumerate(texts):
            types = b"" if segments is None else np.array(segments[place], np.int32).tobytes()
            waiting[name := f"text {self._count}"] = place
            self._count += 1
            for request in self._admission.admit(name, Prompt(list(ids), types=types), asked):
                self._engine.add(request)
        for _ in range(MAX_STEPS):
            for delta in self._engine.step():
                if delta.data is None:
                    raise ContractViolation(f"text {waiting[delta.request_id]} ended without numbers: {delta.error}")
                found[waiting.pop(delta.request_id)] = np.frombuffer(delta.data, np.float32).reshape(delta.shape)
            self._engine.check_integrity()
            if not waiting:
                break
        require(not waiting, f"{len(waiting)} texts still wait after {MAX_STEPS} steps")
        return [found[place] for place in range(len(texts))]

    def forget(self) -> None:
        """Empties the prefix cache."""
        self._engine.reset_prefix_cache()

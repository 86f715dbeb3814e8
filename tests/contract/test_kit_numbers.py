"""The kit's section of numbers names the clause that a platform, or the engine's own pooling, breaks."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quintet.conformance.encoders import ENCODERS
from quintet.engine.pooling.pooler import Gathered, Pooler
from quintet.models import families, model_class
from quintet.platforms.cpu.platform import CPU
from quintet.platforms.interface import Mixer, State, Step
from quintet.types import AttentionSpec, Batch, Inputs, Outputs, StateSpec, Variant
from quintet.weights import Weight
from tests.helpers.planted import Planted, first_failure


class Stepping(CPU):
    """The platform, with another step around its own."""

    def compile(self, model: nn.Module, variants: Iterable[Variant]) -> Step:
        step = super().compile(model, variants)

        @torch.inference_mode()
        def around(state: State, batch: Batch) -> tuple[Outputs, State]:
            outputs, state = step(state, self._before(batch))
            return self._behind(outputs, batch), state

        return around

    def _before(self, batch: Batch) -> Batch:
        return batch

    def _behind(self, outputs: Outputs, batch: Batch) -> Outputs:
        return outputs


class Unsegmented(Stepping):
    """All tokens are of the first segment."""

    def _before(self, batch: Batch) -> Batch:
        types = batch.inputs.types
        return batch if types is None else batch._replace(inputs=Inputs(types=types * 0))


class Swayed(Stepping):
    """Last bits depend on how many tokens there are, though the platform says that they do not."""

    def _behind(self, outputs: Outputs, batch: Batch) -> Outputs:
        assert outputs.hidden is not None
        return outputs._replace(hidden=outputs.hidden * (1 + 3e-7 * len(batch.token_ids)))


class LookingBack(CPU):
    """Attention looks back alone, whatever was asked for."""

    def mixer(self, spec: AttentionSpec | StateSpec, ops: Any, rank: int) -> Mixer:
        return super().mixer(replace(spec, causal=True), ops, rank)


class Rounding(CPU):
    """Weights in half precision, whatever was asked for."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        return super().place(weight, {name: tensor.bfloat16() for name, tensor in parts.items()}, into)


@pytest.mark.parametrize(
    ("platform", "clause", "says"),
    [
        (Unsegmented, "numbers.encoders", "bert: plain: text 0: element"),
        (LookingBack, "numbers.encoders", "bert: plain: text 0: element"),
        (Rounding, "numbers.encoders", "off is allowed"),
        (Swayed, "numbers.alone", "bert: plain: text 0 in float32, beside all: row 0"),
        (Unsegmented, "numbers.served", "scores of pairs, in segments: pair 0"),
        (LookingBack, "numbers.served", "embeddings, and vectors of tokens: text 0, its embedding"),
    ],
)
def test_a_fault_is_caught_and_named(platform: type[CPU], clause: str, says: str) -> None:
    assert says in first_failure(clause, Planted(platform))


def test_a_decoder_that_looks_back_alone_is_caught() -> None:
    assert first_failure("numbers.served", Planted(LookingBack), "a decoder whose tokens see both ways")


def test_a_mean_in_single_precision_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is near, and has other bits where a text comes in pieces."""

    def take(self: Gathered, rows: Any, first: int, kind: str) -> None:
        before = np.zeros(rows.shape[1], np.float32) if first == 0 else self.total
        self.count = first + len(rows)
        self.total = before + rows.sum(0, dtype=np.float32)  # type: ignore[operator]

    monkeypatch.setattr(Gathered, "take", take)
    assert "in pieces: row 0" in first_failure("numbers.served", Planted(), "a decoder's mean")


def test_classes_without_their_activation_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pooler, "_classes", lambda self, x, params: x)
    assert "classes of texts: text 0" in first_failure("numbers.served", Planted())


# the kit's makers know neither their classes nor their layers as yet: tests/e2e compares them, on the CPU
BESIDE = {"albert", "jina_bert", "mpnet", "new", "xlm-roberta-flash"}


def test_every_family_of_encoders_is_tried() -> None:
    there = {kind for kind in families() if model_class(_Named(kind)).encodes}
    assert there == set(ENCODERS) | BESIDE and not BESIDE & set(ENCODERS)


class _Named:
    """A configuration of which nothing but its family is asked."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

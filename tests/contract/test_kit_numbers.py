"""The kit's section of numbers names the clause that a platform, or the engine's own pooling, breaks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quintet.engine.pooling.pooler import PooledRows, Pooler
from quintet.interface.platform import Mixer, State, Step
from quintet.interface.types import AttentionSpec, Batch, Inputs, Outputs, ShapeBucket, StateSpec
from quintet.interface.weights import Weight
from quintet.layers.attention.relative_bias import bias_by_distance
from quintet.layers.rope import SCALINGS
from quintet.models import families, model_class
from quintet.platforms.cpu.platform import CPU
from quintet_tools.checkpoints.custom_encoders import PUBLISHED_ENCODERS
from quintet_tools.checkpoints.encoders import ENCODERS, configured
from tests.helpers.platforms.planted import Planted, first_failure


class Stepping(CPU):
    """The platform, with another step around its own."""

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        step = super().compile(model, buckets)

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
        types = batch.inputs.token_type_ids
        return batch if types is None else batch._replace(inputs=Inputs(token_type_ids=types * 0))


class Swayed(Stepping):
    """Last bits depend on how many tokens there are, though the platform says that they do not."""

    def _behind(self, outputs: Outputs, batch: Batch) -> Outputs:
        assert outputs.hidden_states is not None
        return outputs._replace(hidden_states=outputs.hidden_states * (1 + 3e-7 * len(batch.token_ids)))


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

    def take(self: PooledRows, rows: Any, first: int, kind: str) -> None:
        before = np.zeros(rows.shape[1], np.float32) if first == 0 else self.running_sum
        self.count = first + len(rows)
        self.running_sum = before + rows.sum(0, dtype=np.float32)  # type: ignore[operator]

    monkeypatch.setattr(PooledRows, "add", take)
    assert "in pieces: row 0" in first_failure("numbers.served", Planted(), "a decoder's mean")


def test_classes_without_their_activation_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pooler, "_classes", lambda self, x, params: x)
    assert "classes of texts: text 0" in first_failure("numbers.served", Planted())


def _without_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.models.jina_bert.alibi_slopes", lambda heads: None)


def _without_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.models.mpnet.bias_by_distance", lambda learned: bias_by_distance(learned) * 0)


def _in_files_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of layers once."""
    monkeypatch.setattr("quintet.models.albert.AlbertModel.order", lambda self: self.layers)


def _unstretched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCALINGS, "ntk", SCALINGS["default"])


def _without_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.models.jina_embeddings_v3._merged", lambda plain, *adapter, **more: plain)


@pytest.mark.parametrize(
    ("bucket", "break_it"),
    [
        *((f"jina_bert: {name}", _without_slopes) for name in ENCODERS["jina_bert"]),
        ("mpnet: plain", _without_distances),
        ("albert: groups", _in_files_order),
        *((f"new: {name}", _unstretched) for name in ENCODERS["new"]),
        *((f"xlm-roberta-flash: {name}", _without_adapter) for name in ENCODERS["xlm-roberta-flash"]),
    ],
)
def test_what_a_family_alone_has_is_missed(
    bucket: str, break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert f"{bucket}: text 0: element" in first_failure("numbers.encoders", Planted(), bucket)


def test_every_family_of_encoders_is_tried() -> None:
    assert {kind for kind in families() if model_class(_Named(kind)).is_encoder} == set(ENCODERS)


def test_published_encoders_are_read_as_their_own_family() -> None:
    """Their files may say another's type: it is no other family that is compared."""
    for family in PUBLISHED_ENCODERS:
        for settings in ENCODERS[family].values():
            assert configured(family, settings).model_type == family


class _Named:
    """A configuration of which nothing but its family is asked."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

"""Arrays of a step: a decode step is built from each request's last token, all others from the requests' stretches."""

import numpy as np

from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.request import CoreRequest, Request
from quintet.engine.row_store.items import PromptRows, embeds_items
from quintet.engine.step_plan import StepPlan
from quintet.interface.types import ShapeBucket
from quintet.sampling_params import SamplingParams

EMBEDS = np.arange(12, dtype=np.float32).reshape(3, 4)  # of three tokens


def one_token_left(embeds: bytes = b"") -> StepPlan:
    """Step of a request whose prompt of three tokens is computed but for the last; its rows are on the store's page
    2."""
    request = Request(CoreRequest("0", [5, 6, 7], SamplingParams(), (0, 0), 1, embeds=embeds))
    if embeds:
        request.prompt_rows = PromptRows(embeds_items(request.core_request, 64), {0: [2]})
    request.num_computed, request.pages, request.table_rows = 2, [[1]], [None]
    plan = StepPlan()
    plan.schedule(request, 1)
    return plan


def test_the_last_token_of_a_prompt_of_embeddings_brings_its_row() -> None:
    batch, _ = BatchBuilder(16).build(one_token_left(EMBEDS.tobytes()))
    assert batch.inputs.embeds is None and batch.inputs.embed_indices is not None
    assert batch.inputs.embed_indices.tolist() == [34]


def test_steps_of_fixed_shapes_always_bring_rows_and_others_where_a_request_has_some() -> None:
    """-1 for what has none, padding included."""
    (fixed,) = sizes = (ShapeBucket(4, 2, 2, (1,), inputs=("embed_indices",)),)
    found = [
        BatchBuilder(16, sizes, inputs=("embed_indices",)).build(one_token_left(embeds))[0]
        for embeds in (b"", EMBEDS.tobytes())
    ]
    assert [batch.inputs.embed_indices.tolist() for batch in found] == [[-1] * 4, [34, -1, -1, -1]]  # type: ignore[union-attr]
    assert [x.shape for x in found[0].leaves()] == [x.shape for x in fixed.batch.leaves()]
    assert BatchBuilder(16, inputs=("embed_indices",)).build(one_token_left())[0].inputs.embed_indices is None


def test_a_decode_step_has_one_array_of_rows() -> None:
    """Batch.one_token_per_request compares the two arrays by identity."""
    batch, rows = BatchBuilder(16).build(one_token_left())
    assert batch.inputs.embeds is None and batch.logits_indices is batch.token_to_seq
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([7], [2])
    assert batch.groups[0].slot_mapping.tolist() == [18] and len(rows.sample) == 1

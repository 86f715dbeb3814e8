"""Arrays of a step: a decode step is built from each request's last token, all others from the requests' stretches."""

import numpy as np

from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.request import CoreRequest, Request
from quintet.engine.step_plan import StepPlan
from quintet.sampling_params import SamplingParams

EMBEDS = np.arange(12, dtype=np.float32).reshape(3, 4)  # of three tokens


def one_token_left(embeds: bytes = b"") -> StepPlan:
    """Step of a request whose prompt of three tokens is computed but for the last."""
    request = Request(CoreRequest("0", [5, 6, 7], SamplingParams(), (0, 0), 1, embeds=embeds))
    request.num_computed, request.pages, request.table_rows = 2, [[1]], [None]
    plan = StepPlan()
    plan.schedule(request, 1)
    return plan


def test_the_last_token_of_a_prompt_of_embeddings_brings_its_embedding() -> None:
    batch, _ = BatchBuilder(16).build(one_token_left(EMBEDS.tobytes()))
    assert batch.inputs.embeds is not None and batch.inputs.embed_indices is not None
    assert batch.inputs.embeds.tolist() == [EMBEDS[2].tolist()] and batch.inputs.embed_indices.tolist() == [0]


def test_a_decode_step_has_one_array_of_rows() -> None:
    """Batch.one_token_per_request compares the two arrays by identity."""
    batch, rows = BatchBuilder(16).build(one_token_left())
    assert batch.inputs.embeds is None and batch.logits_indices is batch.token_to_seq
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([7], [2])
    assert batch.groups[0].slot_mapping.tolist() == [18] and len(rows.sample) == 1

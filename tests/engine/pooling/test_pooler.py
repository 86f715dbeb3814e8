"""What becomes of a text's logits: each a sigmoid, shares of all, numbers as they are, or what is above 0."""

from typing import Any

import numpy as np
import pytest
import torch

from quintet.engine.pooling.heads import PoolingLinear
from quintet.engine.pooling.pooler import PooledRows, Pooler
from quintet.hub.pooling_task import Pooling
from quintet.pooling_params import LateChunkingParams, PoolingParams

LOGITS = np.array([[2.0, -1.0], [0.5, -3.0], [-1.5, 4.0]], np.float32)
SHARES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
PLAN = Pooling("classify", True, ("classify", "token_classify"), "LAST", "ALL", True)
PLAIN = (PoolingLinear(np.eye(2, dtype=np.float32)),)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [({}, 1 / (1 + np.exp(-LOGITS))), ({"softmax": True}, SHARES), ({"regression": True}, LOGITS)],
    ids=["sigmoid", "softmax", "regression"],
)
def test_classes_of_a_text_and_of_its_tokens(settings: dict[str, Any], wanted: Any) -> None:
    made = Pooler(PLAN, dict.fromkeys(PLAN.tasks, PLAIN), **settings)
    of_text, of_tokens = (PooledRows() for _ in range(2))
    of_text.add(LOGITS, 0, "LAST")
    of_text.add(LOGITS[2:], 2, "LAST")
    of_tokens.add(LOGITS, 0, "ALL")
    ids = [5, 6, 7]
    np.testing.assert_allclose(made.finish(of_text, PoolingParams(task="classify"), ids), wanted[2], atol=1e-6)
    np.testing.assert_allclose(made.finish(of_tokens, PoolingParams(task="token_classify"), ids), wanted, atol=1e-6)
    given = PoolingParams(task="token_classify", use_activation=False)
    np.testing.assert_array_equal(made.finish(of_tokens, given, ids), LOGITS)


def test_weights_of_tokens_are_0_or_more() -> None:
    """BGE M3's: one number for each token."""
    head = (PoolingLinear(np.array([[1.0, 0.0]], np.float32)),)
    rows = PooledRows()
    rows.add(LOGITS, 0, "ALL")
    made = Pooler(PLAN, {"token_classify": head}, relu=True)
    np.testing.assert_array_equal(made.finish(rows, PoolingParams(task="token_classify"), [5, 6, 7]), [2.0, 0.5, 0.0])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 2**31 - 1])
def test_late_chunks_are_means_before_the_head(size: int) -> None:
    """As vLLM has them: torch's means of each run of tokens, then the head, then length 1."""
    plan = Pooling("embed", True, ("token_embed",), "MEAN", "ALL", True)
    head = PoolingLinear(np.array([[1.0, 2.0], [0.5, -1.0]], np.float32))
    rows = PooledRows()
    rows.add(LOGITS[:1], 0, "ALL")
    rows.add(LOGITS[1:], 1, "ALL")
    chunks = [torch.from_numpy(LOGITS[at : at + size]).mean(0) for at in range(0, len(LOGITS), size)]
    wanted = torch.nn.functional.normalize(torch.stack(chunks) @ torch.tensor([[1.0, 0.5], [2.0, -1.0]]), dim=-1)
    params = PoolingParams(task="token_embed", normalize=True, late_chunking_params=LateChunkingParams(size))
    made = Pooler(plan, {"token_embed": (head,)}, excluded_tokens={"token_embed": (5, None)})
    np.testing.assert_allclose(made.finish(rows, params, [5, 6, 7]), wanted.numpy(), atol=1e-6)

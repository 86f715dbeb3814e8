"""Documents scored against a kept query, beside what score() computes of the same texts."""

import numpy as np
import pytest

from quintet import LLM, PoolingParams
from quintet.pooling_outputs import Unanswered
from quintet.pooling_params import LateInteractionParams

QUERY, DOCUMENTS = "late payments", ["The invoice is overdue.", "Dogs bark at night."]


def test_a_query_is_kept_until_its_documents_were_scored() -> None:
    with LLM("bundled-embed") as llm:

        def run(texts: list[str], late: LateInteractionParams | None) -> list[np.ndarray]:  # type: ignore[type-arg]
            params = PoolingParams(task="token_embed", late_interaction_params=late)
            return [each.outputs.data for each in llm.encode(texts, pooling_params=params, use_tqdm=False)]

        query, *documents = run([QUERY, *DOCUMENTS], None)
        assert run([QUERY], LateInteractionParams("cache_query", "q", 2))[0] == [0]
        scores = run(DOCUMENTS, LateInteractionParams("score_doc", "q"))
        for score, document in zip(scores, documents, strict=True):
            np.testing.assert_allclose(score, [(query @ document.T).max(1).sum()], rtol=1e-6)
        with pytest.raises(Unanswered, match="no query 'q' is kept: run it first"):
            run(DOCUMENTS[:1], LateInteractionParams("score_doc", "q"))
        with pytest.raises(ValueError, match="late_interaction_params are for token_embed, and this is embed"):
            llm.embed(
                QUERY, pooling_params=PoolingParams(late_interaction_params=LateInteractionParams("score_doc", "q"))
            )
        chunks = llm.encode(
            QUERY, pooling_params=PoolingParams(task="token_embed", late_chunking_params={"chunk_size": 2})
        )  # type: ignore[arg-type]
        assert chunks[0].outputs.data.shape == (-(-len(query) // 2), query.shape[1])

"""Candidates of prompt tokens in the rows of one step (prompt_logprob_token_ids)."""

from quintet.engine.request import CoreRequest, Request
from quintet.engine.sampling.prompt_candidates import PromptCandidates
from quintet.sampling_params import SamplingParams


def test_rows_before_the_first_candidates_have_none() -> None:
    """A step's rows that end where the candidates begin take no columns; one row more is the first with some."""
    params = SamplingParams(prompt_logprob_start=5, prompt_logprob_token_ids=[[3, 4], [7]], max_tokens=1)
    request = Request(CoreRequest("0", list(range(8)), params, (0, 0), 1), 0)
    before = PromptCandidates.of_step([(request, 1, 4)], {request: slice(0, 4)}, 6)
    assert before.columns == [] and before.rows == {}
    first = PromptCandidates.of_step([(request, 1, 5)], {request: slice(1, 6)}, 6)
    assert [column.tolist() for column in first.columns] == [[-1] * 5 + [3], [-1] * 5 + [4]]
    assert first.rows == {request: (slice(5, 6), 2)}

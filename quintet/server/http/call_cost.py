"""Cost of an API call's requests, in what the server limits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quintet.engine.processes.model_info import ModelInfo
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import RequestOutputKind
from quintet.server.http.capacity import RequestCost

if TYPE_CHECKING:
    from quintet.server.http.engine_call import PromptRequest

MAX_TEXTS = 256  # of one call that become numbers at once, where they are short
NUMBERS_PER_LOGPROB = 16  # of an answer that take as much memory as a log-probability
LOGPROB_BYTES = 200  # of memory that one log-probability takes


def cost_of(asks: Sequence["PromptRequest"], served: ModelInfo, streamed: bool) -> RequestCost:
    """Returns the cost of a call. Outputs of a stream are sent as they come; others are held until the end."""
    completions = tokens = logprobs = 0
    for prompt, params, _, _, pooling in asks:
        length = len(prompt.token_ids)
        room = served.max_model_len - length
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        passing = streamed and params.output_kind is RequestOutputKind.DELTA
        of_output = _num_logprobs(params.num_logprobs, served) * (1 if passing else most)
        completions, tokens = completions + params.n, tokens + prompt.num_tokens
        if pooling is not None:
            logprobs += _num_values(pooling, served, length) // NUMBERS_PER_LOGPROB + 1
        logprobs += params.n * (length + most) * served.expert_bytes // LOGPROB_BYTES  # 0 unless they are returned
        logprobs += params.n * (of_output + _num_logprobs(params.prompt_logprobs, served) * length)
    if asks and asks[0].pooling is not None:
        completions = min(completions, MAX_TEXTS)
    return RequestCost(completions, tokens, logprobs)


def _num_values(params: PoolingParams, served: ModelInfo, length: int) -> int:
    """Numbers of an answer, which are held until all are there."""
    assert served.pooling is not None
    embeds = params.task in ("embed", "token_embed")
    width = (params.dimensions or served.pooling.width) if embeds else max(len(served.labels), 1)
    return width * (length if params.of_tokens else 1)


def _num_logprobs(num: int | None, served: ModelInfo) -> int:
    """Log-probabilities of one position, that of its own token among them."""
    return 0 if num is None else 1 + (served.vocab_size if num == -1 else num)

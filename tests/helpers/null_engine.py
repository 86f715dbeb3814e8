"""An engine on the null platform, whose next token is known beforehand: for tests of everything but arithmetic."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from quintet import SamplingParams
from quintet.config import EngineConfig
from quintet.engine.client import Client
from quintet.engine.prompts import Prompt
from quintet.outputs import RequestOutput
from quintet.platforms.null.platform import following

VOCAB = 97


@functools.cache
def folder() -> Path:
    """A model's configuration without weights; end-of-text is token 2."""
    from transformers import LlamaConfig

    made = Path(tempfile.mkdtemp(prefix="quintet-null-"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(
        vocab_size=VOCAB, num_key_value_heads=1, max_position_embeddings=512, eos_token_id=2, **sizes
    ).save_pretrained(made)
    return made


def null_client(**settings: Any) -> Client:
    settings = {"max_model_len": 128, "num_pages": 64, **settings}
    config = EngineConfig.from_kwargs(
        model=str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True, **settings
    )
    return Client(config, progress=False)


def expected(prompt: list[int], count: int) -> list[int]:
    """What greedy decoding gives on the null platform."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens[-1], len(tokens) - 1, VOCAB))
    return tokens[len(prompt) :]


def greedy(**settings: Any) -> SamplingParams:
    """Greedy, without text, not ended by end-of-text unless it is asked for."""
    return SamplingParams(**{"temperature": 0, "detokenize": False, "ignore_eos": True, "max_tokens": 8, **settings})


def drain(client: Client) -> dict[str, RequestOutput]:
    """Steps until all is done; the last output of each request."""
    outputs: dict[str, RequestOutput] = {}
    while client.busy:
        outputs.update((output.request_id, output) for output in client.step())
        client.engine.check_integrity()
    return outputs


def complete(client: Client, prompt: list[int], params: SamplingParams) -> RequestOutput:
    client.add("only", Prompt(prompt), params)
    return drain(client)["only"]

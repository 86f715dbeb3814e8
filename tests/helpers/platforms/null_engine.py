"""An engine on the null platform, whose next token is known beforehand: for tests of everything but arithmetic."""

import asyncio
import functools
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quintet import AsyncLLM, SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.outputs import RequestOutput
from quintet.platforms.null.platform import next_token

VOCAB = 97


@functools.cache
def folder() -> Path:
    """A model's configuration without weights; end-of-text is token 2."""
    from transformers import LlamaConfig

    from quintet_tools.checkpoints.tiny import folder_of_all

    made = Path(tempfile.mkdtemp(dir=folder_of_all().name))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(
        vocab_size=VOCAB, num_key_value_heads=1, max_position_embeddings=512, eos_token_id=2, **sizes
    ).save_pretrained(made)
    return made


def null_client(**settings: Any) -> EngineClient:
    settings = {"max_model_len": 128, "num_pages": 64, **settings}
    config = EngineConfig.from_kwargs(
        model=str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True, **settings
    )
    return EngineClient(config, progress=False)


def expected(prompt: list[int], count: int) -> list[int]:
    """What greedy decoding gives on the null platform."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1, VOCAB))
    return tokens[len(prompt) :]


def greedy(**settings: Any) -> SamplingParams:
    """Greedy, without text, not ended by end-of-text unless it is asked for."""
    return SamplingParams(**{"temperature": 0, "detokenize": False, "ignore_eos": True, "max_tokens": 8, **settings})


def drain(client: EngineClient) -> dict[str, RequestOutput]:
    """Steps until all is done; the last output of each request."""
    outputs: dict[str, RequestOutput] = {}
    while client.busy:
        outputs.update((output.request_id, output) for output in client.step())
        client.engine.check_integrity()
    return outputs


def complete(client: EngineClient, prompt: list[int], params: SamplingParams) -> RequestOutput:
    client.add("only", Prompt(prompt), params)
    return drain(client)["only"]


PACKAGES = {"api", "chat", "common", "engine", "structured_output", "tokenizers"}  # of quintet, that CtrlC breaks into


class CtrlC:
    """KeyboardInterrupt at one of the lines that the engine's modules run in this block, counted from 0; it goes no
    further than the block."""

    def __init__(self, at: int) -> None:
        self._left = at

    @property
    def came(self) -> bool:
        """Whether there were so many lines."""
        return self._left < 0

    def __enter__(self) -> "CtrlC":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(self._before)
        return kind is KeyboardInterrupt

    def _call(self, frame: Any, event: str, _: Any) -> Any:
        parts = Path(frame.f_code.co_filename).parts
        return self._line if "quintet" in parts and PACKAGES & set(parts[-4:-1]) else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        self._left -= event == "line"
        if self.came:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return self._line


class Gate:
    """Stands before every step of an engine's thread: closed, or open until a step has given something."""

    def __init__(self, engine: AsyncLLM, until_output: bool = False) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._step, self._shuts = engine._client.step, until_output
        if until_output:
            self.opened.set()
        engine._client.step = self._gated  # type: ignore[method-assign]

    def _gated(self) -> list[RequestOutput]:
        self.reached.set()
        assert self.opened.wait(60), "nobody opened the gate"
        outputs = self._step()
        if outputs and self._shuts:
            self._shuts = False
            self.opened.clear()
        return outputs


async def until(holds: Callable[[], Any]) -> None:
    """Lets the loop run until it holds."""
    while not holds():
        await asyncio.sleep(0.001)

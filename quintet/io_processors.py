"""IO processors: code of yours that makes texts of what a request to /pooling brings, and an answer of their numbers.

vLLM's interface, by the same names. A package names its processors in the entry-point group
`quintet.io_processor_plugins`, or vLLM's `vllm.io_processor_plugins`, as vLLM has it: the entry point is a function
that returns the class's name in full. `--io-processor-plugin` names one of them, or a class as `package.module:Class`.
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from quintet.common.suggestions import unknown_name_error
from quintet.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quintet.pooling_params import PoolingParams

GROUPS = ("quintet.io_processor_plugins", "vllm.io_processor_plugins")
REQUIRED = ("pre_process", "post_process")

Given = TypeVar("Given")
Made = TypeVar("Made")
Output = PoolingRequestOutput[PoolingOutput]


class IOProcessor(ABC, Generic[Given, Made]):
    """One for each process that serves. `config` is what is known of the model
    (quintet.engine.processes.model_info.ModelInfo); `renderer.get_tokenizer()` its tokenizer as transformers' own
    object."""

    def __init__(self, config: Any, renderer: Any = None) -> None:
        self.vllm_config, self.renderer = config, renderer

    def parse_data(self, data: Any) -> Given:
        """Parses `data` of a request; a ValueError describes what is wrong with it, and becomes HTTP status 400."""
        given: Given = data
        return given

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Returns the model's pooling parameters; by default its first task."""
        return params or PoolingParams()

    @abstractmethod
    def pre_process(self, prompt: Given, request_id: str | None = None, **kwargs: Any) -> Any:
        """One prompt for the model, or a list of them: text, token ids, or dicts of these."""

    async def pre_process_async(self, prompt: Given, request_id: str | None = None, **kwargs: Any) -> Any:
        """The same, where something is to be waited for."""
        return self.pre_process(prompt, request_id, **kwargs)

    @abstractmethod
    def post_process(self, model_output: Sequence[Output], request_id: str | None = None, **kwargs: Any) -> Made:
        """The answer, from the numbers of each prompt, in their order."""

    async def post_process_async(
        self, model_output: AsyncIterator[tuple[int, Output]], request_id: str | None = None, **kwargs: Any
    ) -> Made:
        """The same, from (number of the prompt, its numbers)."""
        found = [each async for each in model_output]
        return self.post_process([each for _, each in sorted(found, key=lambda at: at[0])], request_id, **kwargs)


def find(name: str) -> type:
    """The class of a processor. ValueError says why it cannot be had."""
    points = {point.name: point for group in reversed(GROUPS) for point in entry_points(group=group)}
    try:
        if name in points:
            made = points[name].load()
            made = made() if callable(made) and not inspect.isclass(made) else made
            kind = _imported(made) if isinstance(made, str) else made
        elif ":" in name:
            kind = _imported(name)
        else:
            known = (
                unknown_name_error("IO processor", name, points) if points else f"no IO processor {name!r} is installed"
            )
            raise ValueError(f"{known}; install the package that brings it, or name a class as package.module:Class")
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the IO processor {name!r} cannot be imported: {type(error).__name__}: {error}; install what it needs"
        ) from error
    lacking = [each for each in REQUIRED if not callable(getattr(kind, each, None))]
    if not inspect.isclass(kind) or lacking:
        raise ValueError(f"the IO processor {name!r} must be a class with {' and '.join(REQUIRED)}, as IOProcessor has")
    return kind


def make(kind: type, config: Any, tokenizer: Callable[[], Any]) -> Any:
    """An object of it: older classes take the config alone."""
    takes = [each for each in inspect.signature(kind).parameters.values() if each.kind is not each.KEYWORD_ONLY]
    several = len(takes) > 1 or any(each.kind is each.VAR_POSITIONAL for each in takes)
    return kind(config, Renderer(tokenizer)) if several else kind(config)


class Processors:
    """The one that an operator names, made when it is first asked for."""

    def __init__(self, name: str | None) -> None:
        """ValueError says why it cannot be had."""
        self._kind = None if name is None else find(name)
        self._made: Any = None

    def get(self, config: Any, tokenizer: Callable[[], Any]) -> Any:
        """Returns the processor, made at the first call; None if none was named."""
        if self._made is None and self._kind is not None:
            self._made = make(self._kind, config, tokenizer)
        return self._made


class Renderer:
    """Access to the tokenizer for IO processors."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._tokenizer = tokenizer

    def get_tokenizer(self) -> Any:
        """transformers' own object."""
        return self._tokenizer()

    @property
    def tokenizer(self) -> Any:
        """The same."""
        return self._tokenizer()


def parsed(processor: Any, data: Any) -> Any:
    """Returns the request's data as the processor parses it, by either method name."""
    named = ("parse_data", "parse_request") if _own(processor, "parse_data") else ("parse_request", "parse_data")
    parse = next((getattr(processor, each) for each in named if callable(getattr(processor, each, None))), None)
    return data if parse is None else parse(data)


def merged(processor: Any) -> Any:
    """Returns the processor's pooling parameters, from either method name; by default the first task."""
    named = ("merge_pooling_params", "validate_or_generate_params")
    named = named if _own(processor, named[0]) else named[::-1]
    merge = next((getattr(processor, each) for each in named if callable(getattr(processor, each, None))), None)
    return PoolingParams() if merge is None else merge()


async def prompts_of(processor: Any, given: Any, request_id: str) -> Any:
    """Returns the processor's prompts for the model. Older classes need not derive from IOProcessor."""
    own = getattr(processor, "pre_process_async", None) or partial(IOProcessor.pre_process_async, processor)
    return await own(prompt=given, request_id=request_id)


async def answer_of(processor: Any, outputs: AsyncIterator[tuple[int, Output]], request_id: str) -> Any:
    """Returns the processor's answer made from the model's numbers."""
    own = getattr(processor, "post_process_async", None) or partial(IOProcessor.post_process_async, processor)
    return await own(model_output=outputs, request_id=request_id)


def _own(processor: Any, name: str) -> bool:
    """True if the class itself defines the method, rather than inheriting IOProcessor's."""
    method = getattr(type(processor), name, None)
    return method is not None and method is not getattr(IOProcessor, name)


def _imported(name: str) -> Any:
    """`package.module:Class`, or with a dot in the place of the colon."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)

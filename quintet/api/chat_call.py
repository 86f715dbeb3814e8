"""One call of chat(): its conversations, prepared for the engine, and the parsers of their answers."""

import copy
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from quintet.chat.messages import ChatOptions, conversations, load_chat_template
from quintet.chat.output_parser import OutputFormat, OutputParser, Parsers, is_cut_off
from quintet.chat.prepare import ChatInput, ChatModel, PreparedChat, prepare
from quintet.chat.prompts import TakenMedia
from quintet.chat.tool_choice import read_tools
from quintet.common.suggestions import refuse_unknown
from quintet.config import StructuredOutputsConfig
from quintet.media.input import MediaInput
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.parsers.events import MessageBuilder
from quintet.sampling_params import SamplingParams
from quintet.structured_output.grammar_source import GrammarWriter
from quintet.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class CallOptions:
    """Options of chat() for tool calls and reasoning, besides its template."""

    tool_choice: Any = None  # "auto" (where there are tools), "none", "required", or one by name, as in OpenAI's API
    parallel_tool_calls: bool | None = True  # False: one call at most
    tool_call_parser: str | None = None  # by name, or "none"; the one that fits the template if not given
    reasoning_parser: str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None  # of the model's processor of images, video and audio
    media_io_kwargs: Mapping[str, Any] | None = None  # how media are decoded, by kind


class ChatCall:
    """The conversations of one call."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: str,
        messages: Any,
        options: Mapping[str, Any],
        config: StructuredOutputsConfig,
        media: TakenMedia = "",
    ) -> None:
        """`family` is the model's type; `options` are the fields of ChatOptions and CallOptions; `media` makes prompts
        with images, video and audio ready, or is the reason why there are none.

        ValueError says what is wrong with an option.
        """
        ours, templates = ([each.name for each in fields(cls)] for cls in (CallOptions, ChatOptions))
        refuse_unknown("chat option", options, [*templates, *ours])
        template = ChatOptions(**{name: value for name, value in options.items() if name in templates})
        own = None if template.chat_template is None else load_chat_template(template.chat_template)
        call = CallOptions(**{name: value for name, value in options.items() if name in ours})
        call = replace(call, reasoning_parser=call.reasoning_parser or config.reasoning_parser)
        self._model = ChatModel(
            tokenizer=tokenizer,
            parsers=Parsers.select(call, tokenizer, own, family),
            grammars=GrammarWriter(config, tokenizer),
            media=media if isinstance(media, MediaInput) else None,
        )
        tool_choice = read_tools(template.tools, call.tool_choice)
        self._chats = [
            ChatInput(
                messages=each,
                options=replace(template, chat_template=own),
                tool_choice=tool_choice,
                parallel_tool_calls=call.parallel_tool_calls is not False,
                media_io_kwargs=call.media_io_kwargs,
                mm_processor_kwargs=call.mm_processor_kwargs,
            )
            for each in conversations(messages)
        ]

    def __len__(self) -> int:
        """Number of conversations."""
        return len(self._chats)

    async def prepare(self, params: Sequence[SamplingParams], media_worker: Any = None) -> list[PreparedChat]:
        """Prepares each conversation with its params, which do not change; what is alike stays one object.
        `media_worker`: runs what waits for hosts and decoders; None: it is done here.

        ValueError says what is wrong with a message.
        """
        checked = {at: _check_structured_output(each) for at, each in {id(each): each for each in params}.items()}
        alike: dict[tuple[int, tuple[int, ...], str], SamplingParams] = {}
        model = self._model if media_worker is None else replace(self._model, media_worker=media_worker)
        chats = []
        for chat, each in zip(self._chats, params, strict=True):
            made = await prepare(replace(chat, params=checked[id(each)]), model)
            key = (id(each), tuple(made.params.keep_special_tokens), made.grammar)
            chats.append(replace(made, params=alike.setdefault(key, made.params)))
        return chats


def _check_structured_output(params: SamplingParams) -> SamplingParams:
    """Returns params with a structured output that is checked: it may have been set after they were made."""
    if params.structured_outputs is not None:
        params = copy.copy(params)
        params.__post_init__()
    return params


def run_without_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that waits for nothing, without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("the coroutine waits")


class AnswerParser:
    """Takes the answers to one request apart as they come."""

    def __init__(self, output_format: OutputFormat, whole: bool = False) -> None:
        """`whole`: each request has one output."""
        self._format, self._whole = output_format, whole
        self._heard: dict[int, tuple[OutputParser, MessageBuilder]] = {}  # by completion
        self._sizes: dict[int, int] = {}  # characters that were heard

    def take(self, output: RequestOutput, delta: bool = False) -> RequestOutput:
        """Fills the output with the parsed parts of its texts. delta: the texts are the new part, else all so far."""
        for each in output.outputs:
            size = 0 if delta else self._sizes.get(each.index, 0)
            self._sizes[each.index] = len(each.text)
            self._fill(each, each.text[size:], delta)
        return output

    def _fill(self, completion: CompletionOutput, new: str, delta: bool) -> None:
        speech, heard = self._heard.setdefault(
            completion.index, (OutputParser(self._format, self._whole), MessageBuilder())
        )
        ended = completion.finish_reason is not None
        completion.events = speech.feed(new, ended, is_cut_off(completion))
        reasoning, content = (len(heard.reasoning), len(heard.content)) if delta else (0, 0)
        heard.take(completion.events)
        completion.reasoning, completion.content = heard.reasoning[reasoning:], heard.content[content:]
        completion.tool_calls = list(heard.calls)
        completion.message = heard.message() if ended else None

"""The model that an engine process runs, as its clients must know it."""

from dataclasses import dataclass, field
from typing import Any

from quintet.config import ReasoningConfig, StructuredOutputsConfig
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.encoder_text import TextInput
from quintet.media.families import MediaModel
from quintet.media.info import MediaInfo


@dataclass(frozen=True)
class ModelInfo:
    """The model that an engine runs, as its start settled it. Plain data: it crosses processes."""

    model: str  # path or hub id
    tokenizer: str | None  # its folder
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    max_logprobs: int
    eos_ids: list[int]  # of the generation config; the tokenizer may add its own
    seed: int  # of requests that bring none
    num_pages: int  # of the KV cache, those that can hold tokens
    page_size: int
    processors: list[str] = field(default_factory=list)  # logits processors, by dotted name
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling parameters of the generation config
    created: int = 0  # Unix time in seconds
    embeds_width: int = 0  # numbers of an embedding that a prompt may have in the place of a token; 0: none may
    embeds_rows: int = 0  # most embeddings of a prompt, where the row store has to hold all of them; 0: it has not
    by_priority: bool = False  # whether a request's priority counts
    stream_interval: int = 1  # tokens from one output of a stream to the next
    family: str = ""  # of the model: its model_type
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    reasoning: ReasoningConfig = field(default_factory=ReasoningConfig)
    cache_dtype: str = "auto"  # of the KV cache
    prefix_caching: bool = True
    pooling: PoolingBounds | None = None  # what numbers texts may become; None: the model generates text
    labels: list[str] = field(default_factory=list)  # of its classes, where it has some
    transfers: str | None = None  # kv_role, where pages go to other engines or come from them
    step_tokens: int = 2048  # that a step of the engine takes at most
    kv_tokens: int = 0  # that the KV cache holds of requests of max_model_len
    weight_bytes: int = 0  # that the weights take on one device
    num_ranks: int = 1  # of one engine
    encoder: SpeechInput | None = None  # what its encoder of audio takes; None: it has none
    source: TextInput | None = None  # what its encoder of text takes; None: it has none
    media: MediaInfo = field(default_factory=MediaInfo)  # images, video and audio that prompts may have
    media_model: MediaModel | None = None  # how they are made ready; None: there may be none
    no_media: str = ""  # why there may be none
    expert_bytes: int = 0  # of the experts of one token, which outputs have; 0: they have none
    logprobs_mode: str = "raw_logprobs"  # what log-probabilities of outputs are
    dtype: str = ""  # of the weights, such as "bfloat16"
    max_lora_rank: int = 0  # of an adapter; 0: there are none
    max_loras: int = 0  # adapters among the requests that run at once; 0: there are none

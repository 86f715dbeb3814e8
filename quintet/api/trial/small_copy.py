"""Small random copy of a model in transformers: its config, its weights, its folder, and what it computes."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quintet.api.trial.entries import POSITIONS, VOCAB
from quintet.api.trial.shrink import shrink
from quintet.hub.hf_config import LONGEST, transformers_config
from quintet.hub.max_model_len import LENGTHS as LENGTH_ENTRIES
from quintet.models.transformers.construct import is_encoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_WEIGHTS = 20_000_000  # 80 MB of float32
LENGTHS = (5, 19)  # tokens of the prompts; the longer one is longer than the window of a small copy
NEW_TOKENS = 12
CLEAR = 1e-3  # of the logits' standard deviation: a smaller distance of the two largest may be decided by rounding
TRIES = 4  # prompts to draw until no choice is that near
_FIRST_ID = 4  # smaller ids are special tokens


@dataclass(frozen=True)
class SmallCopy:
    """Folder of a small model, the prompts, and the tokens that transformers continues them with, with their
    log-probabilities; of an encoder their hidden states, each [tokens, hidden]."""

    folder: Path
    prompts: list[list[int]]  # of an encoder-decoder, for its encoder
    tokens: list[list[int]]
    logprobs: list[list[float]]
    states: list[torch.Tensor] | None = None
    start: int | None = None  # of an encoder-decoder, the token that its decoder begins with


def make_small_copy(config: "PretrainedConfig", folder: Path, seed: int = 0) -> SmallCopy:
    """Writes a small random model of a text config's type to `folder`. ValueError if transformers has no causal model
    and no encoder of it, makes none of the small config, or computes no finite numbers."""
    kind = config.model_type
    try:
        small = transformers_config(kind, shrink(config), folder / "config.json")
    except Exception as error:  # whatever a class raises, also for an entry that is read
        raise ValueError(f"transformers makes no small config of {kind!r}: {one_line(error)}") from error
    if not any(getattr(small, name, None) for name in LENGTH_ENTRIES):  # ALiBi, recurrent states
        small.seq_length = POSITIONS
    encodes, start = _sees_both_ways(small), _decoder_start(small)
    with torch.random.fork_rng(devices=[]), _without_bars():
        torch.manual_seed(seed)
        model = _model(small, kind)
        randomize(model)
        try:
            model.save_pretrained(folder)
            if encodes:
                prompts, states = _encoded(model)
                return SmallCopy(folder, prompts, [], [], states)
            prompts, tokens, logprobs = _continued(model, start)
        except Exception as error:  # whatever transformers' code raises
            raise ValueError(f"transformers' own code fails on a small copy of {kind!r}: {one_line(error)}") from error
    return SmallCopy(folder, prompts, tokens, logprobs, start=start)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Without transformers' progress bars and advice."""
    from transformers.utils import logging as transformers_log

    verbosity, bars = transformers_log.get_verbosity(), transformers_log.is_progress_bar_enabled()
    transformers_log.set_verbosity_error()
    transformers_log.disable_progress_bar()
    try:
        yield
    finally:
        transformers_log.set_verbosity(verbosity)
        if bars:
            transformers_log.enable_progress_bar()


def one_line(error: BaseException) -> str:
    """The type and the beginning of an error's text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST]


def _decoder_start(config: "PretrainedConfig") -> int | None:
    """Returns the token that the decoder of an encoder-decoder begins with; None of other models."""
    if not getattr(config, "is_encoder_decoder", False):
        return None
    start = getattr(config, "decoder_start_token_id", None)
    return int(start if start is not None else getattr(config, "bos_token_id", None) or 0)


def _sees_both_ways(config: "PretrainedConfig") -> bool:
    """Returns whether it is compared by hidden states: an encoder, or a decoder made into an embedder."""
    return _decoder_start(config) is None and (
        is_encoder(config) or getattr(config, "use_bidirectional_attention", None) is True
    )


def _model(config: "PretrainedConfig", kind: str) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto as auto

    made: Any = AutoModel if _sees_both_ways(config) else AutoModelForCausalLM
    if _decoder_start(config) is not None:
        made = AutoModelForSeq2SeqLM
        if kind not in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"transformers has no encoder-decoder of text of type {kind!r}")
    elif kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and made is not AutoModel:
        raise ValueError(f"transformers has no causal language model and no encoder of type {kind!r}")
    kernels = {"attn_implementation": "eager", "experts_implementation": "eager", "trust_remote_code": False}
    try:
        with torch.device("meta"):
            weights = sum(each.numel() for each in made.from_config(config, **kernels).parameters())
        if weights <= MAX_WEIGHTS:
            return made.from_config(config, **kernels).float().eval()
    except Exception as error:  # whatever a class raises
        raise ValueError(f"transformers makes no small copy of {kind!r}: {one_line(error)}") from error
    large = {name: value for name, value in config.to_dict().items() if isinstance(value, int) and value > 2 * VOCAB}
    listed = ", ".join(f"{name}={value}" for name, value in sorted(large.items())[:8])
    raise ValueError(
        f"a small copy of {kind!r} would have {weights:,} weights, {MAX_WEIGHTS:,} are allowed; large entries: {listed}"
    )


@torch.no_grad()
def randomize(model: Any) -> None:
    """Draws weights: outputs of products are about as large as their inputs; norms and biases are not 1 and 0."""
    from transformers.pytorch_utils import Conv1D

    transposed = {id(each.weight) for each in model.modules() if isinstance(each, Conv1D)}
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # positions that are computed
            continue
        if parameter.dim() < 2:
            parameter.copy_(torch.nan_to_num(parameter).clamp(-8, 8) + torch.randn_like(parameter) * 0.2)
        elif id(parameter) in embeddings or "embed" in name:
            parameter.normal_(0, 1)
        else:
            inputs = parameter.shape[0] if id(parameter) in transposed else parameter.shape[-1]
            parameter.normal_(0, 1.5 * inputs**-0.5)
    for name, each in model.named_buffers():
        if "correction_bias" in name:  # changes the choice of experts
            each.normal_(0, 0.1)


def _prompts(model: Any) -> list[list[int]]:
    count = min(VOCAB, getattr(model.config, "vocab_size", VOCAB))
    return [torch.randint(_FIRST_ID, count, (length,)).tolist() for length in LENGTHS]


@torch.no_grad()
def _encoded(model: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Prompts and their hidden states."""
    prompts = _prompts(model)
    states = [model(torch.tensor([prompt])).last_hidden_state[0].float() for prompt in prompts]
    if not all(bool(each.isfinite().all()) and float(each.std()) > 0 for each in states):
        raise ValueError("its hidden states are not finite, or all alike")
    return prompts, states


def _continued(model: Any, start: int | None) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Prompts, their greedy continuations and the log-probabilities of these: of several draws, one where rounding
    decides no token."""
    for attempt in range(TRIES):
        prompts = _prompts(model)
        greedy = [_greedy(model, prompt, start) for prompt in prompts]
        if attempt == TRIES - 1 or min(margin for *_, margin in greedy) > CLEAR:
            return prompts, [tokens for tokens, *_ in greedy], [logprobs for _, logprobs, _ in greedy]
    raise AssertionError("one attempt is the last")


def _greedy(model: Any, prompt: Sequence[int], start: int | None) -> tuple[list[int], list[float], float]:
    """The next tokens, their log-probabilities, and the smallest distance of the two largest logits, in standard
    deviations. Without a cache: each step computes the whole text. `start`: of a decoder behind an encoder, which reads
    the prompt."""
    ids, logprobs, margin = [*prompt] if start is None else [start], list[float](), float("inf")
    given: dict[str, Any] = {} if start is None else {"input_ids": torch.tensor([prompt])}
    text = "input_ids" if start is None else "decoder_input_ids"
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            logits = model(**given, **{text: torch.tensor([ids])}, use_cache=False).logits[0, -1].float()
        if not bool(logits.isfinite().all()) or float(logits.std()) == 0:
            raise ValueError("its logits are not finite, or all alike")
        first, second = logits.topk(2).values.tolist()
        margin = min(margin, (first - second) / float(logits.std()))
        logprobs.append(float(logits.log_softmax(-1).max()))
        ids.append(int(logits.argmax()))
    return ids[-NEW_TOKENS:], logprobs, margin

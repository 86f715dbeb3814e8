"""Runs a small random copy of a model here and in transformers, and compares the tokens, or an encoder's numbers."""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quintet.api.trial.small_copy import CLEAR, NEW_TOKENS, SmallCopy, make_small_copy, one_line
from quintet.common.json_files import read_object
from quintet.config import INSIDE, EngineConfig, read_environment
from quintet.gguf.config import config as gguf_config
from quintet.gguf.file import is_gguf
from quintet.hub.config_checks import check_entries
from quintet.hub.downloads import download
from quintet.hub.hf_config import is_known_type, transformers_config
from quintet.hub.model_impl import read_model
from quintet.hub.model_names import HUB_ID, is_local
from quintet.hub.wrappers import text_model_type
from quintet.model_loader.gguf_weights import model_of
from quintet.models import families

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NATIVE, BACKEND, REFUSED, NO_COPY, NOT_RUN = "native", "backend", "refused", "no copy", "not run"
TOKENS, STATES = "tokens", "hidden states"  # that are compared
SPEECH = ("whisper", "moonshine")  # encoder-decoders whose encoder takes sound
NEAR = 5e-3  # of log-probabilities
REMEDY = "give a local folder with its config.json"


@dataclass(frozen=True)
class TrialResult:
    """Result of one trial.

    `verdict`: "native" (a family's file runs it), "backend" (transformers' code on quintet's engine), "refused" (by
    quintet), "no copy" (transformers makes or runs no small copy) or "not run"; `equal`: of what was compared, None if
    nothing was; `reason`: of a refusal or a difference; `compared`: "tokens" (greedy) or "hidden states" (encoders).
    """

    model: str
    model_type: str
    verdict: str
    equal: bool | None
    reason: str
    compared: str = TOKENS

    @property
    def passed(self) -> bool:
        return self.equal is True

    def __str__(self) -> str:
        equal, differ = f"{self.compared} equal transformers'", f"{self.compared} differ from transformers'"
        outcome = {True: equal, False: differ, None: "not compared"}[self.equal]
        parts = [self.verdict] + ([outcome] if self.verdict in (NATIVE, BACKEND) else [])
        return f"{self.model} ({self.model_type}): {', '.join(parts)}" + (f": {self.reason}" if self.reason else "")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def try_model(config: EngineConfig) -> TrialResult:
    """Tries the architecture of `config.model`, whose config.json alone is read, or a GGUF file's metadata: no weights,
    no code of the repository. OSError if there is no such file; ValueError if it is no valid config."""
    file = _config_file(config)
    raw = gguf_config(model_of(file)) if is_gguf(file) else read_object(file)
    check_entries(raw, str(file))
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{file} names no model_type; give a model of transformers' layout")
    text_kind = text_model_type(kind, raw, file)
    if not is_known_type(kind):
        native = text_kind in families()
        why = f"transformers has no code of type {kind!r} to compare with"
        why += "; the code that comes with it was not run" if raw.get("auto_map") else ""
        return TrialResult(config.model, kind, NATIVE if native else REFUSED, None, why)
    whole = transformers_config(kind, raw, file)
    if getattr(whole, "is_encoder_decoder", False):
        if kind in SPEECH:
            why = "its encoder hears, and the small copy reads text; `quintet conformance` compares it"
            return TrialResult(config.model, kind, NATIVE, None, why)
        return _compared(config.model, whole)
    try:
        text = whole.get_text_config()
    except ValueError as error:  # several of them
        return TrialResult(config.model, kind, NO_COPY, None, one_line(error))
    return _compared(config.model, text)


def _config_file(config: EngineConfig) -> Path:
    """The config.json of a folder or a hub id, or a GGUF file. Of the hub nothing else is downloaded."""
    name = config.model
    folder = Path(__file__).parents[2] / name if name in INSIDE else Path(name).expanduser()
    if is_gguf(folder):
        return folder
    if folder.is_file():
        raise ValueError(
            f"{name!r} is a file, and none of GGUF or whisper.cpp; {REMEDY}, or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    if not folder.is_dir():
        if is_local(name) or not HUB_ID.fullmatch(name) or "--" in name or ".." in name:
            raise FileNotFoundError(f"no folder {name!r} here, and it is no hub id such as 'Qwen/Qwen3-0.6B'; {REMEDY}")
        folder = download(name, config.revision, config, ["config.json"], read_environment(), REMEDY)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name!r} has no config.json; {REMEDY}")
    return folder / "config.json"


def _compared(name: str, text: "PretrainedConfig") -> TrialResult:
    kind = str(text.model_type)
    with tempfile.TemporaryDirectory(prefix="quintet-try-") as folder:
        try:
            small = make_small_copy(text, Path(folder))
        except ValueError as error:
            return TrialResult(name, kind, NO_COPY, None, str(error).replace(folder, "the copy"))
        host = torch.get_default_device().type  # the processor, where the reference was computed, too
        settings: dict[str, Any] = {
            "model": folder, "device": host, "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64,
            "kv_cache_memory_bytes": "16M", "use_tqdm": False,
        }  # fmt: skip
        try:
            _, backend = read_model(EngineConfig(model=folder, device=host), Path(folder), {})
            difference = (
                _difference(run_here(small, settings), small)
                if small.states is None
                else _distance(encode_here(small, settings), small.states)
            )
        except Exception as error:  # transformers' code may raise anything
            reason = str(error) if isinstance(error, (ValueError, OSError)) else one_line(error)
            return TrialResult(name, kind, REFUSED, None, " ".join(reason.replace(folder, "the copy").split()))
    verdict = BACKEND if backend else NATIVE
    return TrialResult(name, kind, verdict, not difference, difference, TOKENS if small.states is None else STATES)


def run_here(small: SmallCopy, settings: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of the prompts and their log-probabilities, by an engine on the CPU."""
    from quintet.api.llm import LLM
    from quintet.sampling_params import SamplingParams

    llm = LLM(**settings)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in small.prompts]
    if small.start is not None:
        begun = {"prompt_token_ids": [small.start]}
        prompts = [{"encoder_prompt": prompt, "decoder_prompt": begun} for prompt in prompts]
    outputs = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
    if failed := next((each for each in outputs if each.finish_reason == "error"), None):
        raise RuntimeError(str(failed.error))
    return [
        (
            list(each.token_ids),
            [at[token].logprob for token, at in zip(each.token_ids, each.logprobs or [], strict=True)],
        )
        for each in outputs
    ]


def encode_here(small: SmallCopy, settings: dict[str, Any]) -> list[torch.Tensor]:
    """Hidden states of the prompts, by an engine on the CPU."""
    from quintet.api.llm import LLM
    from quintet.pooling_params import PoolingParams

    llm = LLM(**settings, runner="pooling", convert="embed")
    params = PoolingParams(task="token_embed", normalize=False)
    outputs = llm.encode(list(small.prompts), params, use_tqdm=False)
    return [torch.from_numpy(output.outputs.data.copy()) for output in outputs]


def _distance(here: list[torch.Tensor], reference: list[torch.Tensor]) -> str:
    """Compares hidden states; "" if all are as near as rounding lets them be."""
    for prompt, (ours, theirs) in enumerate(zip(here, reference, strict=True), 1):
        far = float((ours - theirs).abs().max() / theirs.std())
        if not far <= CLEAR:
            return f"a number of prompt {prompt} is {far:.2g} standard deviations off, {CLEAR:g} are allowed"
    return ""


def _difference(here: list[tuple[list[int], list[float]]], small: SmallCopy) -> str:
    """The first token that differs, or whose probability does; "" if all are equal."""
    for prompt, ((ours, found), theirs, wanted) in enumerate(zip(here, small.tokens, small.logprobs, strict=True), 1):
        if ours != theirs:
            pairs = zip(ours, theirs, strict=False)
            place = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
            return f"token {place + 1} of {len(theirs)} after prompt {prompt} is another"
        far, place = max((abs(one - other), at) for at, (one, other) in enumerate(zip(found, wanted, strict=True), 1))
        if not far <= NEAR:
            return f"the log-probability of token {place} after prompt {prompt} is {far:.2g} off, {NEAR:g} are allowed"
    return ""

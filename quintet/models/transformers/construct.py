"""The modules of a model as transformers makes them, without memory for weights; and why some cannot run here."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NAME, TRACED = "quintet", "quintet_traced"  # attn_implementation: of steps, and of the trace
KNOWN = ("full_attention", "sliding_attention")  # kinds of layers that keep K and V of all positions, or of a window
RESIZED = ("dynamic", "longrope")  # rotary scalings that transformers switches by the longest position of a step


class Unsupported(ValueError):
    """Raised for a model that cannot run through the backend, with the reason."""

    def __init__(self, config: Any, why: str) -> None:
        super().__init__(f"model type {config.model_type!r} cannot run through the Transformers backend: {why}")


@contextmanager
def explained(config: Any, what: str) -> Iterator[None]:
    """Makes any exception of transformers' code one sentence: Unsupported. Errors of ours, and of the system, pass."""
    try:
        yield
    except (ValueError, OSError, MemoryError):
        raise
    except Exception as error:  # whatever that code raises, in any version of it
        raise Unsupported(config, f"{what} failed ({failure(error)})") from error


def failure(error: Exception) -> str:
    """Describes an exception of transformers' code in one line, with what to do."""
    import transformers

    reason = " ".join(str(error).split())[:300]
    return (
        f"{type(error).__name__} in transformers {transformers.__version__}: {reason}; another version of transformers "
        "may run it"
    )


def constructed(config: Any, dtype: torch.dtype, length: int, tied: bool, has_logits: bool = True) -> nn.Module:
    """The causal model of a transformers config, or without logits its trunk; parameters are on the meta device,
    buffers as transformers computes them for requests of up to `length` tokens. `tied`: its head is its embedding.
    Unsupported if it cannot run."""
    from transformers import AutoModel, AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.tie_word_embeddings = tied
    trusted = bool(getattr(config, "runs_own_code", False))
    _check_config(config)
    if not trusted:
        _check_known(config, has_logits)
    register()
    try:
        with EmptyTensors():
            model = (AutoModelForCausalLM if has_logits else AutoModel).from_config(
                config, dtype=dtype, attn_implementation=TRACED, trust_remote_code=trusted
            )
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises
        raise Unsupported(config, f"transformers does not build it ({failure(error)})") from error
    model.config.use_cache = False
    if getattr(model, "pooler", None) is not None:  # it reads the first token alone, and heads are the engine's
        model.pooler = None
    use_own_loop(model)
    _check_class(type(model), config)
    _settle_rotary(model, length)
    model.eval()
    built: nn.Module = model
    return built


def is_encoder(config: Any) -> bool:
    """Returns whether tokens of a transformers config's model see both ways: such models are trained to fill masks."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decodes


def _check_config(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(config, "it has an encoder and a decoder")
    odd = sorted({*(getattr(config, "layer_types", None) or ())} - {*KNOWN})
    if odd:
        raise Unsupported(
            config, f"it has layers of {', '.join(odd)}, and those of {' and '.join(KNOWN)} alone are served"
        )


def _check_known(config: Any, has_logits: bool) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    known = MODEL_FOR_CAUSAL_LM_MAPPING if has_logits else MODEL_MAPPING
    if type(config) not in known:
        what = "that generates text (AutoModelForCausalLM)" if has_logits else "without a head (AutoModel)"
        raise Unsupported(config, f"transformers has no class of it {what}")
    found = known[type(config)]
    _check_class(found[0] if isinstance(found, tuple) else found, config)


def _check_class(made: Any, config: Any) -> None:
    """Checks the class's declarations: no recurrent state, replaceable attention, and the inputs of forward()."""
    if getattr(made, "_is_stateful", False):
        raise Unsupported(config, "its layers keep a recurrent state")
    if not getattr(made, "_supports_attention_backend", False):
        raise Unsupported(
            config,
            f"{made.__name__} does not say that others may compute its attention (_supports_attention_backend)",
        )
    taken = inspect.signature(made.forward).parameters
    missing = [each for each in ("input_ids", "position_ids") if each not in taken]
    if missing:
        raise Unsupported(config, f"its forward() takes no {' and no '.join(missing)}")


class EmptyTensors(TorchFunctionMode):
    """Puts tensors made to be filled (parameters) on the meta device, without memory; buffers are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty, torch.randn, torch.rand):
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def use_own_loop(model: Any) -> None:
    """Experts by the model's own code: what transformers would choose in its place depends on the machine."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"


def _settle_rotary(model: nn.Module, length: int) -> None:
    """Tables that transformers would make anew by the longest position of a step are made for `length`, and stay: a key
    in the cache must not be turned by another angle than one that comes later."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind if isinstance(kind, dict) else {None: kind}
        for layers, each in kinds.items():
            if each in RESIZED:
                last = torch.full((1, 1), length - 1)
                module(torch.zeros(1, 1, 1), last, *([] if layers is None else [layers]))
        settled = {layers: "default" if each in RESIZED else each for layers, each in kinds.items()}
        if settled != kinds:
            module.rope_type = settled if isinstance(kind, dict) else settled[None]  # type: ignore[assignment]


Attend = Callable[..., tuple[torch.Tensor, None]]
Mask = Callable[..., Any]
_tracing: ContextVar[tuple[Attend, Mask]] = ContextVar("_tracing")


def register() -> None:
    """Tells transformers of our attention, by names of its own. Again is no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, _attended)
        AttentionInterface.register(TRACED, _traced)
        AttentionMaskInterface.register(TRACED, _masked)


def _attended(module: Any, query: Any, key: Any, value: Any, *mask: Any, **more: Any) -> Any:
    return module.attended(query, key, value, more.get("s_aux"))


def _traced(module: Any, *args: Any, **more: Any) -> Any:
    return _tracing.get()[0](module, *args, **more)


def _masked(*args: Any, **more: Any) -> Any:
    return _tracing.get()[1](*args, **more)


@contextmanager
def traced_by(attend: Attend, mask: Mask) -> Iterator[None]:
    """Within, these are what a model calls that was made for a trace."""
    token = _tracing.set((attend, mask))
    try:
        yield
    finally:
        _tracing.reset(token)

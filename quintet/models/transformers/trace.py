"""One tiny step of a model without weights: which attention it has, and that nothing else mixes positions.

The step runs on the host. Products and tables give numbers that depend on their inputs alone: weights take no memory.
Attention gives each token its own value, so that a token's outputs must not depend on its neighbours.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quintet.models.transformers.construct import Unsupported, traced_by
from quintet.ops.moe import experts

TOKENS = (3, 7, 5, 11)  # of the step; more than one, and no two alike
FAR = 10_000_000  # a position, beyond any window
# What layers hand on to every attention, and what it means is known: computed from the mask, or of no matter here.
PASSED = {
    *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "position_embeddings"),
    *("use_cache", "output_attentions", "output_hidden_states", "past_key_values", "cache_position", "layer_idx"),
    *("attention_mask", "return_dict", "layer_type", "output_router_logits", "logits_to_keep"),
}


@dataclass(frozen=True)
class MaskPattern:
    """Positions that a token attends to, as a mask has them."""

    causal: bool = True
    window: int | None = None  # the token and those before it


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in a step."""

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int  # of q and k
    value_dim: int
    scale: float
    seen: MaskPattern
    softcap: float | None = None
    sinks: bool = False


@dataclass
class ForwardTrace:
    """Record of a trial step. One with a first position of -1 gives the model no positions."""

    calls: list[AttentionCall] = field(default_factory=list)
    products: Counter[int] = field(default_factory=Counter)  # how often a parameter was a product's weight, by its id
    lookups: Counter[int] = field(default_factory=Counter)  # likewise, of tables whose rows were looked up
    touched: Counter[int] = field(default_factory=Counter)  # parameters that were taken for anything else
    masks: dict[int, Callable[..., Any]] = field(default_factory=dict)  # a mask's memory -> what made it
    kept: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)  # q, k and v of each call, [T, H, D]
    first_position: int = 0  # of a text's first token

    def again(self) -> "ForwardTrace":
        """Returns an empty record of another step of the same model."""
        return ForwardTrace(first_position=self.first_position)


def traced(model: Any, length: int) -> ForwardTrace:
    """Traces a model from constructed(), for requests of up to `length` tokens. Unserved says what is not computed."""
    first = torch.tensor([TOKENS])
    trace = ForwardTrace(first_position=first_position(model, first))
    plain = _run(model, first, trace)
    for place in (0, -1):
        other = first.clone()
        other[0, place] += 2
        changed = (_run(model, other, trace.again()) - plain).abs().amax(-1)[0]
        own, rest = changed[place], torch.cat([changed[:place], changed[place:][1:]])
        if not own > 0:
            raise Unsupported(model.config, "its outputs in a trial do not depend on its tokens")
        if not rest.max() <= 1e-2 * own:
            raise Unsupported(
                model.config, "its layers mix tokens otherwise than by the attention that transformers lets others do"
            )
    _check_places(model, first, trace, plain, length)
    layers = getattr(model.config, "num_hidden_layers", 0)
    if len(trace.calls) < layers:
        raise Unsupported(model.config, f"it has {layers} layers, and attention in {len(trace.calls)} of them")
    return trace


def _check_places(model: Any, ids: Tensor, trace: ForwardTrace, plain: Tensor, length: int) -> None:
    """A step's tokens are several requests': each must go by its own position, neither by its place in the step nor by
    the longest text in it."""
    order = torch.arange(ids.shape[1])
    far = torch.cat([order[:-1], order[-1:].clamp(min=length - 1 - trace.first_position)])
    for tokens, places, rows in ((ids.flip(1), order.flip(0), order.flip(0)), (ids, far, order[:-1])):
        other = trace.again()
        logits = _run(model, tokens, other, places[None])
        for one, again in ((plain[0], logits[0]), *zip(trace.given, other.given, strict=True)):
            if not torch.allclose(one[: len(rows)], again[rows], rtol=1e-2, atol=1e-2 * float(one.abs().max())):
                raise Unsupported(
                    model.config, "its layers count tokens by themselves, whatever positions they are given"
                )


def first_position(model: Any, ids: Tensor) -> int:
    """Returns the position that a text's first token has where a model is given none: 0, or the one behind padding's
    (RoBERTa). Unsupported where it is another."""
    plain = _run(model, ids, ForwardTrace(first_position=-1))
    behind = (getattr(model.config, "pad_token_id", None) or 0) + 1
    for first in (0, behind):
        again = _run(model, ids, ForwardTrace(first_position=first))
        if torch.allclose(plain, again, rtol=1e-2, atol=1e-2 * float(plain.abs().max())):
            return first
    raise Unsupported(model.config, "the positions of its tokens begin neither at 0 nor behind the padding token's id")


@torch.no_grad()
def _run(model: Any, ids: Tensor, trace: ForwardTrace, positions: Tensor | None = None) -> Tensor:
    """-> logits [1, T, V], or a trunk's hidden states, in float32. Without `positions` those of one text."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **more: Any
    ) -> tuple[Tensor, None]:
        if positions is None:  # of others, transformers' masks think that they are several texts
            seen = _seen(module, model.config, attention_mask, trace, more)
            trace.calls.append(_call(model.config, module, (query, key, value), seen, more))
        trace.given += [each[0].transpose(0, 1).float() for each in (query, key, value)]
        own = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return own.transpose(1, 2).contiguous(), None

    def mask(*args: Any, **more: Any) -> Tensor:
        made = torch.ones(1, 1, ids.shape[1], more.get("kv_length", ids.shape[1]), dtype=torch.bool)
        trace.masks[made.untyped_storage().data_ptr()] = more["mask_function"]
        trace.kept.append(made)
        return made

    places = torch.arange(ids.shape[1])[None] if positions is None else positions
    given = {} if trace.first_position < 0 else {"position_ids": places + trace.first_position}
    try:
        with traced_by(attend, mask), _WithoutWeights(trace):
            out = model(**forward_inputs(accepted_inputs(model), ids), **given)
    except Unsupported:
        raise
    except Exception as error:  # whatever a model raises that is given no cache and no mask
        reason = " ".join(str(error).split())[:300]
        raise Unsupported(model.config, f"a trial step failed ({type(error).__name__}: {reason})") from error
    first: Tensor = out[0]  # of either kind of model
    return first.float()


def accepted_inputs(model: Any) -> frozenset[str]:
    """Returns which of forward_inputs() a model's forward() takes."""
    taken = inspect.signature(model.forward).parameters
    has_segments = "token_type_ids" in taken and bool(getattr(model.config, "type_vocab_size", None))
    takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    named = {"token_type_ids": has_segments, "use_cache": "use_cache" in taken or takes_all}
    return frozenset(name for name, is_taken in named.items() if is_taken)


def forward_inputs(accepted: Collection[str], ids: Tensor, segments: Tensor | None = None) -> dict[str, Any]:
    """Returns arguments of forward(), beside positions. ids and segments: [1, T]."""
    found = {"token_type_ids": torch.zeros_like(ids) if segments is None else segments, "use_cache": False}
    return {"input_ids": ids, **{name: value for name, value in found.items() if name in accepted}}


def _call(
    config: Any, module: Any, qkv: tuple[Tensor, Tensor, Tensor], seen: MaskPattern, more: dict[str, Any]
) -> AttentionCall:
    q, k, v = qkv
    unknown = sorted(name for name, value in more.items() if name not in PASSED and not _nothing(value))
    if unknown:
        raise Unsupported(config, f"its attention gets arguments that are not supported: {', '.join(unknown)}")
    if q.shape[0] != 1 or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise Unsupported(config, f"its attention has queries {list(q.shape)} and keys {list(k.shape)}")
    scale = more.get("scaling")
    return AttentionCall(
        module, q.shape[1], k.shape[1], q.shape[3], v.shape[3], float(q.shape[3] ** -0.5 if scale is None else scale),
        seen, more.get("softcap"), more.get("s_aux") is not None,
    )  # fmt: skip


def _nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (tuple, list, dict)) and not value)


def _seen(module: Any, config: Any, mask: Any, trace: ForwardTrace, more: dict[str, Any]) -> MaskPattern:
    """Positions seen, by the mask that the layer was given; without one, by its is_causal and sliding_window."""
    if mask is None:
        causal = more.get("is_causal", getattr(module, "is_causal", None))
        return MaskPattern(causal is None or bool(causal), more.get("sliding_window"))
    made = trace.masks.get(mask.untyped_storage().data_ptr()) if isinstance(mask, Tensor) else None
    if made is None:
        raise Unsupported(config, "its layers make masks of their own")
    seen = _by_mask(made)
    if seen is None:
        raise Unsupported(config, "its masks are of another kind than causal ones and windows (chunks, blocks, images)")
    return seen


def _by_mask(made: Callable[..., Any]) -> MaskPattern | None:
    """Positions that a mask function of (batch, head, query, key) allows; None if neither all, causal nor a window, to
    one side or to both alike."""

    def sees(query: int, key: int) -> bool:
        nought = torch.tensor(0)
        return bool(made(nought, nought, torch.tensor(query), torch.tensor(key)))

    causal = not sees(FAR, FAR + 1)
    if not sees(FAR, FAR):
        return None
    if sees(FAR, 0):
        whole = sees(FAR, FAR // 2) and sees(FAR // 3, 1) and (causal or sees(0, FAR))
        return MaskPattern(causal) if whole else None
    near, far = 0, FAR  # distances that are seen, and not
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if sees(FAR, FAR - middle) else (near, middle)
    signs = (-1,) if causal else (-1, 1)
    alike = all(
        sees(at, at + sign * near) and not sees(at, at + sign * far)
        for sign in signs
        for at in range(FAR, FAR + 2 * far, max(1, far // 3))
    )
    return MaskPattern(causal, window=far) if alike else None


class _WithoutWeights(TorchFunctionMode):
    """Products and tables without their weights; other functions get numbers in the place of what is not there."""

    def __init__(self, trace: ForwardTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and _absent(args[1]):
            self._trace.products[id(args[1])] += 1
            outputs, inputs = args[1].shape
            if args[0].shape[-1] != inputs:
                raise ValueError(f"a product takes {inputs} inputs and is given {args[0].shape[-1]}")
            return _product(args[0], outputs)
        if func is nn.functional.embedding and _absent(args[1]):
            self._trace.lookups[id(args[1])] += 1
            return _rows(args[0], args[1])
        return func(*self._filled(args), **dict(zip(kwargs, self._filled(kwargs.values()), strict=True)))

    def _filled(self, values: Any) -> list[Any]:
        return [self._instead(each) for each in values]

    def _instead(self, value: Any) -> Any:
        if isinstance(value, Tensor) and _absent(value):
            self._trace.touched[id(value)] += 1
            number = 0.5 if value.dim() < 2 else 1 / value.shape[-1]  # a matrix keeps the size of its inputs
            return torch.full((), number, dtype=value.dtype).expand(value.shape)
        return type(value)(self._filled(value)) if type(value) in (list, tuple) else value


def _absent(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta


def _waves(count: int, pace: float) -> Tensor:
    return torch.cos(torch.arange(1, count + 1) * pace)


def _product(x: Tensor, outputs: int) -> Tensor:
    """Two numbers of each row, spread over the outputs."""
    wide = x.float()
    pairs = ((0.7, 1.3), (1.9, 0.4))
    made = sum(
        torch.sin((wide * _waves(x.shape[-1], taken)).sum(-1, keepdim=True)) * _waves(outputs, given)
        for taken, given in pairs
    )
    assert isinstance(made, Tensor)
    return made.to(x.dtype)


def _rows(ids: Tensor, table: Tensor) -> Tensor:
    return torch.cos((ids[..., None] + 1) * torch.arange(1, table.shape[1] + 1) * 0.37).to(table.dtype)


def alike_experts(module: Any, kind: str) -> bool:
    """Returns whether a module of experts computes what ours do: both are run, on three small experts.

    Half of the tokens are large, so that a clamp shows.
    """
    generator = torch.Generator().manual_seed(3)
    gate_up, down, x = (torch.randn(*shape, generator=generator) for shape in ((3, 10, 4), (3, 4, 5), (6, 4)))
    x[3:] *= 1000
    ids = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1], [2, 0], [1, 2]])
    weights = torch.rand(ids.shape, generator=generator)
    other = copy.copy(module)
    held = {"gate_up_proj": gate_up, "down_proj": down}
    other._parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in held.items()}
    other.num_experts, other.hidden_dim, other.intermediate_dim = 3, 4, 5
    try:
        with torch.no_grad():
            theirs = other(x, ids, weights)
    except Exception:  # whatever a class raises that wants something else
        return False
    ours = experts(x, gate_up, down, weights, ids.int(), kind)
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
        return False
    most = ours.abs().amax(-1, keepdim=True)  # of each token
    return bool(((theirs - ours).abs() <= 1e-4 * most + 1e-5).all())


def only_looked_up(module: nn.Embedding, trace: ForwardTrace) -> bool:
    """Returns whether no code but the table's own took its weight in a trial."""
    own, key = ForwardTrace(), id(module.weight)
    with torch.no_grad(), _WithoutWeights(own):
        module(torch.tensor([TOKENS]))
    return trace.touched[key] == own.touched[key] * trace.lookups[key]


def alike_table(module: nn.Module, scale: float) -> bool:
    """Returns whether an embedding table returns its rows times `scale`."""
    weight, ids = torch.randn(7, 4, generator=torch.Generator().manual_seed(7)), torch.tensor([[5, 0, 3]])
    other = copy.copy(module)
    other._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        with torch.no_grad():
            theirs = other(ids)
    except Exception:  # whatever a class raises that wants something else
        return False
    return isinstance(theirs, Tensor) and torch.allclose(theirs, weight[ids] * scale, rtol=1e-2)


def alike(module: nn.Module, ours: Callable[[Tensor, Tensor], Tensor], width: int) -> bool:
    """Returns whether a module with one vector `weight` equals our function of (x [T, width], weight): both are run."""
    generator = torch.Generator().manual_seed(width)
    weight, x = torch.randn(width, generator=generator), torch.randn(5, width, generator=generator) * 3
    other = copy.copy(module)
    other._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        with torch.no_grad():
            theirs = other(x[None])
    except Exception:  # whatever a class raises that wants something else
        return False
    return isinstance(theirs, Tensor) and torch.allclose(theirs, ours(x, weight)[None], rtol=1e-5, atol=1e-5)

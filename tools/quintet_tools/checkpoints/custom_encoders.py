"""Encoders that transformers has no class for: checkpoints as they are published, and what they are compared with.

GTE's `new` and Jina v3 are a class of transformers under other names, its frequencies or weights changed by the
published formulas; Jina v2 is written down by itself. None of this is shared with quintet/models.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quintet_tools.checkpoints.custom_families import slopes
from quintet_tools.checkpoints.published import (
    QKV,
    Published,
    Settings,
    Tensors,
    fused,
    renamed,
    stacked,
)

# ------------------------------------------------------------------------------------------------------------ Jina v2

GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"geglu": functional.gelu, "reglu": functional.relu}
LATER = "qk-post-norm"  # in the name of the code of the later generation, which says so nowhere else


class JinaBlock(nn.Module):
    """Attention by its definition, its scores and their slopes in float32, and its sum and norm."""

    def __init__(self, said: Settings) -> None:
        super().__init__()
        width, self.heads = said["hidden_size"], said["num_attention_heads"]
        self.width, self.inner, self.eps = width, said["intermediate_size"], said.get("layer_norm_eps", 1e-12)
        own = nn.ModuleDict({each: nn.Linear(width, width) for each in ("query", "key", "value")})
        out = nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": self.norm()})
        self.attention: Any = nn.ModuleDict({"self": own, "output": out})

    def norm(self) -> nn.LayerNorm:
        """One of its own, over all features."""
        return nn.LayerNorm(self.width, self.eps)

    def attended(self, x: Tensor, sloped: Tensor) -> Tensor:
        """x [T, H]; sloped: [heads, T, T], what is added to the scores."""
        own, out = self.attention["self"], self.attention["output"]
        q, k, v = (own[each](x) for each in ("query", "key", "value"))
        if "layer_norm_q" in own:
            q, k = own["layer_norm_q"](q), own["layer_norm_k"](k)
        q, k, v = (each.view(len(x), self.heads, -1).transpose(0, 1).float() for each in (q, k, v))
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + sloped).softmax(-1)
        mixed = (weights @ v).transpose(0, 1).flatten(1).to(x.dtype)
        summed: Tensor = out["LayerNorm"](out["dense"](mixed) + x)
        return summed


class Gated(JinaBlock):
    """In English: the gate is the first half."""

    def __init__(self, said: Settings) -> None:
        super().__init__(said)
        self._act: Any = GATES[said["feed_forward_type"]]
        up, down = nn.Linear(self.width, 2 * self.inner, bias=False), nn.Linear(self.inner, self.width)
        self.mlp = nn.ModuleDict({"gated_layers": up, "wo": down, "layernorm": self.norm()})

    def forward(self, x: Tensor, sloped: Tensor) -> Tensor:
        y = self.attended(x, sloped)
        gate, up = self.mlp["gated_layers"](y).chunk(2, -1)
        out: Tensor = self.mlp["layernorm"](self.mlp["wo"](self._act(gate) * up) + y)
        return out


class Normed(JinaBlock):
    """The later generation: q and k are normed, attention's sum once more with its input; the gate is the second."""

    def __init__(self, said: Settings) -> None:
        super().__init__(said)
        self._act: Any = GATES[said["feed_forward_type"]]
        self.attention["self"].update({"layer_norm_q": self.norm(), "layer_norm_k": self.norm()})
        up, down = nn.Linear(self.width, 2 * self.inner, bias=False), nn.Linear(self.inner, self.width)
        self.mlp = nn.ModuleDict({"up_gated_layer": up, "down_layer": down})
        self.layer_norm_1, self.layer_norm_2 = self.norm(), self.norm()

    def forward(self, x: Tensor, sloped: Tensor) -> Tensor:
        y = self.layer_norm_1(x + self.attended(x, sloped))
        up, gate = self.mlp["up_gated_layer"](y).chunk(2, -1)
        out: Tensor = self.layer_norm_2(y + self.mlp["down_layer"](up * self._act(gate)))
        return out


class Ungated(JinaBlock):
    """BERT's feed-forward."""

    def __init__(self, said: Settings) -> None:
        super().__init__(said)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(self.width, self.inner)})
        self.output = nn.ModuleDict({"dense": nn.Linear(self.inner, self.width), "LayerNorm": self.norm()})

    def forward(self, x: Tensor, sloped: Tensor) -> Tensor:
        y = self.attended(x, sloped)
        inner = functional.gelu(self.intermediate["dense"](y))
        out: Tensor = self.output["LayerNorm"](self.output["dense"](inner) + y)
        return out


class Jina(nn.Module):
    """Called as transformers' trunks are, with one text; its modules have the published files' names."""

    def __init__(self, said: Settings) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="jina_bert")
        width, ungated = said["hidden_size"], said["feed_forward_type"] == "original"
        later = LATER in str(said.get("auto_map"))
        kind: type[JinaBlock] = Normed if later else Ungated if ungated else Gated
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(said["vocab_size"], width),
                "token_type_embeddings": nn.Embedding(said["type_vocab_size"], width),
                "LayerNorm": nn.LayerNorm(width, said.get("layer_norm_eps", 1e-12)),
            }
        )
        layers = nn.ModuleList(kind(said) for _ in range(said["num_hidden_layers"]))
        self.encoder = nn.ModuleDict({"layer": layers})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)})  # stands in the files, and gives nothing here
        self._slopes = torch.tensor(slopes(said["num_attention_heads"]))

    def forward(self, ids: Tensor, token_type_ids: Tensor | None = None) -> Any:
        types = ids * 0 if token_type_ids is None else token_type_ids
        steps = torch.arange(ids.shape[1])
        sloped = -self._slopes[:, None, None] * (steps[None, :] - steps[:, None]).abs()
        tables = self.embeddings
        x = tables["LayerNorm"](tables["word_embeddings"](ids[0]) + tables["token_type_embeddings"](types[0]))
        for layer in self.encoder["layer"].children():
            x = layer(x, sloped)
        return SimpleNamespace(last_hidden_state=x[None])


def _as_it_is(tensors: Tensors, said: Settings) -> Tensors:
    return tensors


# ------------------------------------------------------------------------------------------------------ Nomic Embed v2


class NomicExperts(nn.Module):
    """Two stacks of rows, of both products, and a bias of what the experts add up to."""

    def __init__(self, said: Settings) -> None:
        super().__init__()
        rows = said["num_experts"] * said["n_inner"]
        self.mlp = nn.ParameterDict({name: nn.Parameter(torch.randn(rows, said["n_embd"])) for name in ("w1", "w2")})
        self.bias = nn.Parameter(torch.zeros(said["n_embd"]))


class NomicBlock(nn.Module):
    """Attention with rotary positions, and BERT's feed-forward or experts, each followed by its sum and norm."""

    def __init__(self, said: Settings, index: int) -> None:
        super().__init__()
        width, inner, self.said = said["n_embd"], said["n_inner"], said
        self.norm1, self.norm2 = (nn.LayerNorm(width, said["layer_norm_epsilon"]) for _ in range(2))
        self.attn = nn.ModuleDict({"Wqkv": nn.Linear(width, 3 * width), "out_proj": nn.Linear(width, width)})
        self.is_mixture = index % said["moe_every_n_layers"] == 1
        router = nn.ModuleDict({"layer": nn.Linear(width, said["num_experts"], bias=False)})
        mixture = {"router": router, "experts": NomicExperts(said)}
        plain = {"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)}
        self.mlp: Any = nn.ModuleDict(mixture if self.is_mixture else plain)

    def attended(self, x: Tensor) -> Tensor:
        heads = self.said["n_head"]
        q, k, v = self.attn["Wqkv"](x).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        half = q.shape[-1] // 2
        pace = self.said["rotary_emb_base"] ** (-torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None] * pace
        cos, sin = torch.cos(angles).to(x.dtype), torch.sin(angles).to(x.dtype)

        def turned(part: Tensor) -> Tensor:
            a, b = part.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        weights = (turned(q) @ turned(k).mT / q.shape[-1] ** 0.5).softmax(-1)
        out: Tensor = self.attn["out_proj"]((weights @ v).transpose(0, 1).flatten(1))
        return out

    def mixed(self, x: Tensor) -> Tensor:
        """The sum of the chosen experts by their shares of a softmax over all, which need not add up to 1."""
        shares, chosen = self.mlp["router"]["layer"](x).softmax(-1).topk(self.said["moe_top_k"], -1)
        own = self.mlp["experts"]
        first, second = (own.mlp[name].unflatten(0, (self.said["num_experts"], -1)) for name in ("w1", "w2"))
        rows = []
        for each, part, ids in zip(x, shares, chosen, strict=True):
            outputs = torch.stack([functional.gelu(each @ first[expert].T) @ second[expert] for expert in ids])
            rows.append(part @ outputs)
        return torch.stack(rows) + own.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.attended(x) + x)
        y = self.mixed(x) if self.is_mixture else self.mlp["fc2"](functional.gelu(self.mlp["fc1"](x)))
        out: Tensor = self.norm2(y + x)
        return out


class NomicMoE(nn.Module):
    """Called as transformers' trunks are, with one text; its modules have the published files' names."""

    def __init__(self, said: Settings) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="nomic_bert_moe")
        width = said["n_embd"]
        tables = {"word_embeddings": said["vocab_size"], "token_type_embeddings": said["type_vocab_size"]}
        self.embeddings = nn.ModuleDict({name: nn.Embedding(count, width) for name, count in tables.items()})
        self.emb_ln = nn.LayerNorm(width, said["layer_norm_epsilon"])
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(NomicBlock(said, i) for i in range(said["n_layer"]))})

    def forward(self, ids: Tensor, token_type_ids: Tensor | None = None) -> Any:
        types = ids * 0 if token_type_ids is None else token_type_ids
        words, kinds = self.embeddings["word_embeddings"](ids[0]), self.embeddings["token_type_embeddings"](types[0])
        x = self.emb_ln(words + kinds)
        for layer in self.encoder["layers"].children():
            x = layer(x)
        return SimpleNamespace(last_hidden_state=x[None])


# ------------------------------------------------------------------------------------------------------------ Jina v3

TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
UNSAID = "text-matching"  # the task that is used if none is given


def _flash_config(said: Settings) -> dict[str, Any]:
    return {**said, "rope_parameters": {"rope_type": "default", "rope_theta": said["rotary_emb_base"]}}


def _flash_name(name: str) -> tuple[str, int]:
    """The published tensor, and which third of it a tensor of transformers' is; -1: all."""
    for at, part in enumerate(QKV):
        if f"self_attn.{part}" in name:
            return f"encoder.{name.replace(f'self_attn.{part}', 'mixer.Wqkv')}", at
    names = {
        r"self_attn\.o_proj": "mixer.out_proj",
        r"post_attention_layernorm": "norm1",
        r"post_mlp_layernorm": "norm2",
        r"^embeddings\.LayerNorm": "emb_ln",
        r"^layers\.": "encoder.layers.",
    }
    return next(iter(renamed({name: torch.empty(0)}, names))), -1


def _adapters(name: str, outputs: int, inputs: int, said: Settings) -> tuple[Tensor, Tensor]:
    """Returns A and B of every task, the same for the same name: for a product [tasks, r, inputs] and [tasks, outputs,
    r]; for an embedding table the two shapes are swapped."""
    drawn, rank, table = torch.Generator().manual_seed(zlib.crc32(name.encode())), said["lora_rank"], "embed" in name
    shapes = ((outputs, rank), (rank, inputs)) if table else ((rank, inputs), (outputs, rank))
    a, b = (torch.randn(len(TASKS), *shape, generator=drawn) * 0.2 for shape in shapes)
    return a, b


def _flash(tensors: Tensors, said: Settings) -> Tensors:
    """With q, k and v in one, and adapters beside what they change."""
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        own, third = _flash_name(name)
        parts.setdefault(own, {})[third] = tensor
    held = {}
    for name, each in parts.items():
        whole = torch.cat([each[third] for third in sorted(each)])
        if whole.dim() != 2:
            held[f"roberta.{name}"] = whole
            continue
        base = f"roberta.{name.removesuffix('weight')}parametrizations.weight"
        a, b = _adapters(name, whole.shape[0], whole.shape[1], said)
        held |= {f"{base}.original": whole, f"{base}.0.lora_A": a, f"{base}.0.lora_B": b}
    return held


@torch.no_grad()
def _flash_computes(model: Any, said: Settings) -> Any:
    """Its weights with what the task's adapter adds."""
    task = TASKS.index(said.get("task", UNSAID))
    for name, tensor in model.named_parameters():
        own, third = _flash_name(name)
        if tensor.dim() == 2:
            shares = 1 if third < 0 else len(QKV)
            a, b = _adapters(own, shares * tensor.shape[0], tensor.shape[1], said)
            change = a[task] @ b[task] if "embed" in own else b[task] @ a[task]
            tensor += change.chunk(shares)[max(third, 0)] * said["lora_alpha"] / said["lora_rank"]
    return model


# ---------------------------------------------------------------------------------------------------------------- GTE


def _new_config(said: Settings) -> dict[str, Any]:
    rest = {name: value for name, value in said.items() if name not in ("rope_theta", "rope_scaling")}
    return {**rest, "rope_parameters": {"rope_type": "default", "rope_theta": said["rope_theta"]}}


def _new(tensors: Tensors, said: Settings) -> Tensors:
    """q, k and v in one, and the feed-forward's second and first in one."""
    names = {
        r"^layers\.": "encoder.layer.",
        r"self_attn\.": "attention.",
        r"post_attention_layernorm": "attn_ln",
        r"post_mlp_layernorm": "mlp_ln",
        r"^": "new.",
    }
    pairs = fused(fused(tensors, QKV, "qkv_proj", stacked), ("up_proj", "gate_proj"), "up_gate_proj", stacked)
    return renamed(pairs, names)


def _new_computes(model: Any, said: Settings) -> Any:
    """Frequencies of heads of `size`, by the two formulas that GTE's code has."""
    size, base, scaling = said["hidden_size"] // said["num_attention_heads"], said["rope_theta"], said["rope_scaling"]
    factor, mixed, pairs = scaling["factor"], scaling.get("mixed_b"), torch.arange(0, size, 2).double()
    if mixed is None:
        found = (base * factor) ** (-pairs / size) / factor ** (2 / size)
    else:
        steps = torch.arange(1, size // 2 + 1).double()
        found = base ** (-pairs / size) / torch.exp(math.log(factor) / (size / 2) ** mixed * steps**mixed)
    model.rotary_emb.inv_freq = found.float()
    return model


PUBLISHED_ENCODERS: Mapping[str, Published] = {
    "jina_bert": Published("JinaBertModel", "", dict, _as_it_is, own=Jina),
    "nomic_bert_moe": Published("NomicBertModel", "", dict, _as_it_is, own=NomicMoE),
    "new": Published("NewModel", "gte", _new_config, _new, _new_computes, "its frequencies stretched as published"),
    "xlm-roberta-flash": Published(
        "XLMRobertaModel",
        "jina_embeddings_v3",
        _flash_config,
        _flash,
        _flash_computes,
        "a task's adapter added to its weights",
    ),
}

"""Models of RWKV-7 and Plamo 2, which transformers has no class for: the published formulas, token by token.

Modules have the published files' names; states and positions are float32, whatever the weights are. None of it is
shared with quintet/models or its ops.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Settings = Mapping[str, Any]


class Causal(nn.Module):
    """Called as transformers' models are: ids [1, T] -> logits [1, T, vocab]."""

    def __init__(self, settings: Settings, trunk: nn.Module) -> None:
        super().__init__()
        self.model = trunk
        tied = settings["tie_word_embeddings"]
        self.lm_head = None if tied else nn.Linear(settings["hidden_size"], settings["vocab_size"], bias=False)
        self.config = SimpleNamespace(model_type=type(trunk).__name__)

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
        """Returns the logits of one request."""
        x = self.model(ids[0])
        head = self.model.get_parameter("embed_tokens.weight") if self.lm_head is None else self.lm_head.weight
        return SimpleNamespace(logits=functional.linear(x, head)[None])


def before(x: Tensor) -> Tensor:
    """Each token's predecessor [T, C], zeros before the first."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


# ------------------------------------------------------------------------------------------------------------- RWKV-7


class Lora(nn.Module):
    """Three of them: down, an activation, up."""

    def __init__(self, hidden: int, rank: int, act: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(hidden, rank, bias=False), act, nn.Linear(rank, hidden, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lora(x)
        return out


class ReferenceTimeMix(nn.Module):
    """Peng et al. 2025, section 4.1 and appendix; the names are flash-linear-attention's."""

    def __init__(self, settings: Settings, first: bool) -> None:
        super().__init__()
        hidden, self.dim = settings["hidden_size"], settings["head_dim"]
        heads = hidden // self.dim
        for name in "rwkvag":
            setattr(self, f"x_{name}", nn.Parameter(torch.rand(1, 1, hidden)))
        self.k_k, self.k_a = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.r_k = nn.Parameter(torch.zeros(heads, self.dim))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.w_lora = Lora(hidden, settings["decay_low_rank_dim"], nn.Tanh())
        self.a_lora = Lora(hidden, settings["a_low_rank_dim"], nn.Identity())
        self.g_lora = Lora(hidden, settings["gate_low_rank_dim"], nn.Sigmoid(), bias=False)
        if not first:
            self.v_lora = Lora(hidden, settings["v_low_rank_dim"], nn.Identity())
        self.g_norm = nn.GroupNorm(heads, hidden, eps=self.dim * settings["norm_eps"])

    def forward(self, x: Tensor, values: list[Tensor]) -> Tensor:
        tokens, hidden = x.shape
        xr, xw, xk, xv, xa, xg = (torch.lerp(x, before(x), getattr(self, f"x_{name}")[0]) for name in "rwkvag")
        r, k, v, a = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv), torch.sigmoid(self.a_lora(xa))
        decay = torch.exp(-0.606531 * torch.sigmoid(self.w_lora(xw)))
        if values:
            v = torch.lerp(v, values[0], torch.sigmoid(self.v_lora(xv)))
        else:
            values.append(v)
        erased = functional.normalize((k * self.k_k).view(tokens, -1, self.dim), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, k, v, a, decay, erased = (each.float().view(tokens, -1, self.dim) for each in (r, k, v, a, decay, erased))
        state, out = torch.zeros(hidden // self.dim, self.dim, self.dim), []
        for t in range(tokens):  # S (diag(w) - u' (a u)) + v' k, in the paper's words with rows for columns
            turn = torch.diag_embed(decay[t]) - erased[t, :, :, None] * (a[t] * erased[t])[:, None]
            state = state @ turn + v[t, :, :, None] * k[t, :, None]
            out.append((state @ r[t, :, :, None]).squeeze(-1))
        y = self.g_norm(torch.stack(out).view(tokens, hidden).to(x.dtype))
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * v).view(tokens, hidden).to(x.dtype)
        made: Tensor = self.o_proj(y * self.g_lora(xg))
        return made


class ReferenceChannelMix(nn.Module):
    """A feed-forward with squared relu."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden = settings["hidden_size"]
        self.x_k = nn.Parameter(torch.rand(hidden))
        self.key = nn.Linear(hidden, settings["intermediate_size"], bias=False)
        self.value = nn.Linear(settings["intermediate_size"], hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.value(torch.relu(self.key(torch.lerp(x, before(x), self.x_k))) ** 2)
        return out


class GooseBlock(nn.Module):
    """Two branches, and a norm more in the first block."""

    def __init__(self, settings: Settings, first: bool) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(settings["hidden_size"], eps=settings["norm_eps"])

        if first:
            self.pre_norm = norm()
        self.attn_norm, self.ffn_norm = norm(), norm()
        self.attn, self.ffn = ReferenceTimeMix(settings, first), ReferenceChannelMix(settings)

    def forward(self, x: Tensor, values: list[Tensor]) -> Tensor:
        x = self.pre_norm(x) if hasattr(self, "pre_norm") else x
        x = x + self.attn(self.attn_norm(x), values)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Goose(nn.Module):
    """The trunk."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(settings["vocab_size"], settings["hidden_size"])
        self.layers = nn.ModuleList(GooseBlock(settings, i == 0) for i in range(settings["num_hidden_layers"]))
        self.norm = nn.LayerNorm(settings["hidden_size"], eps=settings["norm_eps"])

    def forward(self, ids: Tensor) -> Tensor:
        x, values = self.embeddings(ids), list[Tensor]()
        for layer in self.layers:
            x = layer(x, values)
        out: Tensor = self.norm(x)
        return out


# ------------------------------------------------------------------------------------------------------------ Plamo 2


def rms(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


class Mamba(nn.Module):
    """Mamba 2's recurrence (Dao and Gu 2024), steered by a projection of the convolution's output."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden, self.heads, self.dim = (
            settings[name] for name in ("hidden_size", "mamba_num_heads", "hidden_size_per_head")
        )
        inner, self.state, self.eps = self.heads * self.dim, settings["mamba_d_state"], settings["rms_norm_eps"]
        self.rank, taps = max(64, hidden // 16), settings["mamba_d_conv"]
        self.in_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1, bias=False)
        self.bcdt_proj = nn.Linear(inner, 2 * self.state + self.rank, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.heads, bias=False)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.rand(self.heads)) for _ in range(3))
        self.dt_norm_weight = nn.Parameter(torch.ones(self.rank))
        self.B_norm_weight, self.C_norm_weight = (nn.Parameter(torch.ones(self.state)) for _ in range(2))
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = len(x)
        gate, x = self.in_proj(x).view(tokens, self.heads, 2, self.dim).unbind(2)
        mixed = self.conv1d(x.reshape(tokens, -1).T[None])[0, :, :tokens].T
        x = functional.silu(mixed)
        into, out, dt = self.bcdt_proj(x).split([self.state, self.state, self.rank], dim=-1)
        into, out = rms(into, self.B_norm_weight, self.eps), rms(out, self.C_norm_weight, self.eps)
        dt = functional.softplus(self.dt_proj(rms(dt, self.dt_norm_weight, self.eps)) + self.dt_bias)
        x, into, out, dt = x.float().view(tokens, self.heads, self.dim), into.float(), out.float(), dt.float()
        state, made = torch.zeros(self.heads, self.dim, self.state), []
        for t in range(tokens):
            kept = torch.exp(-torch.exp(self.A_log) * dt[t])
            state = state * kept[:, None, None] + torch.einsum("h,hp,n->hpn", dt[t], x[t], into[t])
            made.append(state @ out[t] + self.D[:, None] * x[t])
        y: Tensor = self.out_proj((torch.stack(made) * functional.silu(gate)).view(tokens, -1).to(gate.dtype))
        return y


class ReferenceAttention(nn.Module):
    """Attention with norms per head; with a window of n each token sees n tokens before it, and itself."""

    def __init__(self, settings: Settings, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = (
            settings[name] for name in ("num_attention_heads", "num_key_value_heads", "hidden_size_per_head")
        )
        self.window, hidden = window, settings["hidden_size"]
        self.qkv_proj = nn.Linear(hidden, (self.heads + 2 * self.kv) * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_weight = nn.Parameter(torch.ones(self.heads, self.dim))
        self.k_weight = nn.Parameter(torch.ones(self.kv, self.dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = len(x)
        q, k, v = self.qkv_proj(x).view(tokens, -1, self.dim).split([self.heads, self.kv, self.kv], dim=1)
        q, k = self._turned(rms(q, self.q_weight, 1e-6)), self._turned(rms(k, self.k_weight, 1e-6))
        k, v = (each.repeat_interleave(self.heads // self.kv, 1) for each in (k, v))
        back = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
        seen = (back >= 0) & (back <= (tokens if self.window is None else self.window))
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        out: Tensor = self.o_proj(mixed.transpose(0, 1).reshape(tokens, -1))
        return out

    def _turned(self, x: Tensor) -> Tensor:
        half = self.dim // 2
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin, (a, b) = angles.cos()[:, None], angles.sin()[:, None], x.split(half, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class PlamoBlock(nn.Module):
    """Norms before and after each branch."""

    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__()
        hidden, self.eps, width = (settings[name] for name in ("hidden_size", "rms_norm_eps", "intermediate_size"))
        window = None if index in settings["full_attention_idx"] else settings["attention_window_size"]
        step = settings["mamba_step"]
        self.mixer = ReferenceAttention(settings, window) if index % step == step // 2 else Mamba(settings)
        self.mlp = nn.ModuleDict(
            {
                "gate_up_proj": nn.Linear(hidden, 2 * width, bias=False),
                "down_proj": nn.Linear(width, hidden, bias=False),
            }
        )
        for name in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp"):
            self.add_module(f"{name}_norm", nn.ParameterDict({"weight": torch.zeros(hidden)}))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._norm("post_mixer", self.mixer(self._norm("pre_mixer", x, 1.0)), 0.2)
        gate, up = self.mlp["gate_up_proj"](self._norm("pre_mlp", x, 1.0)).chunk(2, dim=-1)
        return x + self._norm("post_mlp", self.mlp["down_proj"](functional.silu(gate) * up), 5**-1.5)

    def _norm(self, name: str, x: Tensor, offset: float) -> Tensor:
        return rms(x, self.get_parameter(f"{name}_norm.weight"), self.eps, offset)


class Plamo(nn.Module):
    """The trunk."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(settings["vocab_size"], settings["hidden_size"])
        layers = nn.ModuleList(PlamoBlock(settings, i) for i in range(settings["num_hidden_layers"]))
        self.layers = nn.ModuleDict({"layers": layers})
        self.norm = nn.ParameterDict({"weight": torch.zeros(settings["hidden_size"])})
        self.eps = settings["rms_norm_eps"]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers["layers"]:  # type: ignore[attr-defined]  # a list
            x = layer(x)
        return rms(x, self.norm["weight"], self.eps, 1.0)

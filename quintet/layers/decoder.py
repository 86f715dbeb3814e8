"""The trunk that decoder-only families share: embed, run the blocks, keep the rows that are asked for, normalise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quintet.layers.build import Build
from quintet.layers.embedding import Embedding
from quintet.layers.linear import LMHead
from quintet.layers.norm import RMSNorm
from quintet.platforms.interface import KV
from quintet.types import Batch

Block = Callable[[Any, Build, int], nn.Module]  # (config, build, index) -> a module like PreNormBlock


class Decoder(nn.Module):
    """Token ids -> normalised hidden states of batch.logit_rows, and the cache."""

    def __init__(self, config: Any, build: Build, block: Block, scale: float = 1.0, norm_offset: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = Embedding(build, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(config, build, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps, norm_offset)
        self._ops, self._scale = build.ops.take("embedding", "scale"), scale

    def forward(self, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        x = self.embed_tokens(batch.token_ids)
        if self._scale != 1.0:
            x = self._ops.scale(x, self._scale)
        cache = []
        residual: Tensor | None = None
        for layer, pages in zip(self.layers, kv, strict=True):
            x, residual, pages = layer(x, residual, pages, batch)
            cache.append(pages)
        wanted = batch.logit_rows
        x = self._ops.embedding(wanted, x, 0, False)
        if residual is None:
            return self.norm(x), tuple(cache)
        return self.norm(x, self._ops.embedding(wanted, residual, 0, False))[0], tuple(cache)


class PreNormBlock(nn.Module):
    """Llama's block. It hands its last branch and the residual on apart, so that the next norm can add them."""

    def __init__(self, config: Any, build: Build, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor | None, kv: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, kv = self.self_attn(x, kv, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual, kv


class SandwichBlock(nn.Module):
    """Gemma's block: norms, kept around 0, before and after each branch."""

    def __init__(self, config: Any, build: Build, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(build, width, eps, offset=1.0)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(build, width, eps, offset=1.0)
        self.pre_feedforward_layernorm = RMSNorm(build, width, eps, offset=1.0)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(build, width, eps, offset=1.0)

    def forward(self, x: Tensor, residual: Tensor | None, kv: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, kv = self.self_attn(x, kv, batch)
        x, residual = self.pre_feedforward_layernorm(self.post_attention_layernorm(x), residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual, kv


class CausalLM(nn.Module):
    """What every family's Model is: a trunk, a head, and what its checkpoints hold besides or call otherwise."""

    # patterns of tensors that a checkpoint may hold and no layer asks for; a head that is tied may be stored again
    ignored: ClassVar[tuple[str, ...]] = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")
    model: nn.Module
    lm_head: LMHead

    @staticmethod
    def canonical(name: str) -> str:
        """The name that the modules use for a checkpoint's tensor."""
        return name

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """Of a checkpoint's tensor that is a stack of several: the modules' names for them, and where each lies."""
        return {}

    @property
    def vocab_size(self) -> int:
        return self.lm_head.vocab

    def forward(self, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        """One step: (cache, T tokens) -> (logits [L, vocab], cache)."""
        x, kv = self.model(kv, batch)
        return self.lm_head(x), kv


def layer_window(config: Any, index: int) -> int | None:
    """The layer's window in tokens, by the checkpoint's layer_types; None: it sees all."""
    kind = config.layer_types[index]
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(f"layer_types[{index}] is {kind!r}; {config.model_type} here has full and sliding attention")
    window: int | None = config.sliding_window if kind == "sliding_attention" else None
    return window


def refuse(config: Any, *flags: str) -> None:
    """ValueError if the checkpoint sets one of these: what it means is not computed here."""
    for flag in flags:
        if getattr(config, flag, None):
            raise ValueError(f"{config.model_type} with {flag}={getattr(config, flag)!r} is not supported")


def rounded(value: float, dtype: torch.dtype) -> float:
    """As the type would hold it: some checkpoints were trained with a constant rounded so."""
    return torch.tensor(value, dtype=dtype).item()


def head_source(config: Any) -> str:
    """The checkpoint's tensor behind the logits: its own, or the embedding's."""
    return "/model.embed_tokens" if config.tie_word_embeddings else "/lm_head"

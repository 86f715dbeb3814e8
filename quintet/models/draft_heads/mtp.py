"""Heads for multi-token prediction (DeepSeek-AI 2024): a layer of the model's own kind, which its checkpoint holds."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, norm_eps
from quintet.layers.layer_state import StepState
from quintet.layers.norm import RMSNorm
from quintet.models.draft_heads.base import DraftHead, fusion


class MTPLayout(NamedTuple):
    """Names of a head's modules in a checkpoint, where {L} is the number of the model's layers, and how it computes."""

    block: str = "model.layers.{L}"
    embed_norm: str = "model.layers.{L}.enorm"
    hidden_norm: str = "model.layers.{L}.hnorm"
    product: str = "model.layers.{L}.eh_proj"
    last_norm: str | None = "model.layers.{L}.shared_head.norm"  # None: the model's own
    norm_offset: float = 0.0
    hidden_first: bool = False  # the product reads the hidden state before the embedding
    feeds_normalized: bool = False  # the next token's hidden state is what the language-model head reads
    # entries of config.json with which the family's first layer is the head's
    entries: Mapping[str, Any] = {}


DEEPSEEK = MTPLayout(entries={"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]})
QWEN = MTPLayout(
    block="mtp.layers.0",
    embed_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    product="mtp.fc",
    last_norm="mtp.norm",
    norm_offset=1.0,
    feeds_normalized=True,
    entries={"layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1},
)
MIMO = MTPLayout(
    block="model.mtp_layers.0",
    embed_norm="model.mtp_layers.0.token_layernorm",
    hidden_norm="model.mtp_layers.0.hidden_layernorm",
    product="model.mtp_layers.0.input_proj",
    last_norm="model.mtp_layers.0.final_layernorm",
    hidden_first=True,
)
# As FastDeploy, its authors' engine, computes it; vLLM has no norm before the language-model head
ERNIE = MTPLayout(
    block="model.mtp_block.0",
    embed_norm="model.mtp_emb_norm.0",
    hidden_norm="model.mtp_hidden_norm.0",
    product="model.mtp_linear_proj.0",
    last_norm=None,
    feeds_normalized=True,
    entries={"moe_layer_start_index": 1},
)
LAYOUTS: Mapping[str, MTPLayout] = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"), DEEPSEEK),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), QWEN),
    "mimo": MIMO,
    "ernie4_5_moe": ERNIE,
}


class MTPHead(DraftHead):
    """The embedding of a token and the normalised hidden state of the token before it, normalised and joined by a
    product, go through one layer. Further tokens come from the same layer."""

    ignored_tensors: tuple[str, ...] = (r".*",)  # the rest of the checkpoint is the model's
    family: Callable[[Any, BuildContext], CausalLM]  # class of the model

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        layout, self._layout = LAYOUTS[config.model_type], LAYOUTS[config.model_type]
        width, eps, layers = config.hidden_size, norm_eps(config), config.num_hidden_layers
        inner = type(self).family(_one_layer(config, layout), build)
        block = inner.get_submodule(f"{inner.trunk_name}.layers.0")
        product = layout.product.format(L=layers)
        made: dict[str, nn.Module] = {
            layout.block: block,
            layout.embed_norm: RMSNorm(build, width, eps, layout.norm_offset),
            layout.hidden_norm: RMSNorm(build, width, eps, layout.norm_offset),
            layout.product: fusion(build, f"/{product}", 2 * width, width),
        }
        if layout.last_norm is not None:
            made[layout.last_norm] = RMSNorm(build, width, eps, layout.norm_offset)
        for name, module in made.items():
            _put(self, name.format(L=layers), module)
        self._parts: tuple[Any, ...] = (
            *made.values(),
            inner,
        )  # a tuple: they are in the tree by their checkpoint's names

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._parts[-1].gathered(entries)
        return found

    def combine(self, states: Tensor, places: Tensor | None) -> Tensor:
        out: Tensor = self._borrowed[1](states)
        return out

    def hidden_states(self, embeds: Tensor, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor]:
        block, embed_norm, hidden_norm, product, *own = self._parts[:-1]
        (last_norm,) = own or (self._borrowed[1],)
        pair = embed_norm(embeds), hidden_norm(hidden)
        x = product(self._ops.beside(*(reversed(pair) if self._layout.hidden_first else pair)))
        x, residual = block(x, None, cache)
        normalized, following = last_norm(self.rows(x, cache), self.rows(residual, cache))
        return normalized, normalized if self._layout.feeds_normalized else following


def mtp_head(family: type[CausalLM]) -> type[MTPHead]:
    """Returns the class of the heads that have layers of this family."""
    names = {"family": family, "canonical": staticmethod(family.canonical), "unstacked": staticmethod(family.unstacked)}
    return type(f"{family.__name__}MTPHead", (MTPHead,), names)


def _one_layer(config: Any, layout: MTPLayout) -> Any:
    """Returns the configuration of a model of one layer, which is the head's."""
    made = copy.copy(config)
    made.num_hidden_layers = 1
    for name, value in layout.entries.items():
        if hasattr(made, name):
            setattr(made, name, value)
    return made


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    """Puts a module into the tree under a dotted path."""
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    root.add_module(last, module)

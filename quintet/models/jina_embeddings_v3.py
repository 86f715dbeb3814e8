"""Jina Embeddings v3 (Sturua et al. 2024), the trunk: XLM-RoBERTa with rotary positions and an adapter per task."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import QKV, Encoder
from quintet.layers.rope import Rotary
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.roberta import FLASH

TASK, NONE = "text-matching", "none"  # the default task; no adapter
PLAIN, DOWN, UP = (f".parametrizations.weight.{end}" for end in ("original", "0.lora_A", "0.lora_B"))


class JinaEmbeddingsV3Model(Encoder):
    """Positions turn. As published (xlm-roberta-flash), the adapter of the config's `task` is added to the weights."""

    prefixes = ("roberta.", "jina_embeddings_v3.", "model.")
    names = (
        ("embeddings.word_embeddings.", "words."),
        ("embeddings.token_type_embeddings.", "types."),
        ("embeddings.LayerNorm.", "norm."),
        *FLASH,
        ("self_attn.", "attention."),
        ("post_attention_layernorm.", "attention_norm."),
        ("post_mlp_layernorm.", "norm."),
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        tasks = getattr(config, "lora_adaptations", None) or ()
        asked = getattr(config, "task", None) or (TASK if TASK in tasks else NONE)
        if asked not in (*tasks, NONE):
            raise ValueError(f"task={asked!r} is none of this model's; choose one of {', '.join((*tasks, NONE))}")
        self._adapters = bool(tasks)
        self._task = list(tasks).index(asked) if asked in tasks else None
        self._strength = config.lora_alpha / config.lora_rank if tasks else 0.0

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """Splits an adapter of q, k and v in one: each has a third of the outputs, and all of the adapter's rank."""
        if not name.endswith((DOWN, UP)) or ".qkv_proj." not in name:
            return Encoder.unstacked(name, shape)
        whole = slice(None)
        thirds = Encoder.unstacked(name, shape[1:]) if name.endswith(UP) else dict.fromkeys(_parts(name), (whole,))
        return {part: (whole, *at) if name.endswith(UP) else at for part, at in thirds.items()}

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merges the weights for all tasks with the LoRA adapter of the one task."""
        if not self._adapters:
            return entries
        found = {name: entry for name, entry in entries.items() if not name.endswith((PLAIN, DOWN, UP))}
        for name in (name.removesuffix(PLAIN) for name in entries if name.endswith(PLAIN)):
            missing = [name + end for end in (DOWN, UP) if name + end not in entries]
            if missing:
                raise ValueError(f"the files lack {' and '.join(missing)}; fetch the model anew")
            table = name in ("words", "types")
            first, second = (UP, DOWN) if not table else (DOWN, UP)  # of a table, the two are turned
            beside = entries[name + first], entries[name + second]
            merge = partial(_merged, task=self._task, strength=self._strength)
            found[f"{name}.weight"] = TransformedTensor(entries[name + PLAIN], merge, beside)
        return found

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return None

    def rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return Rotary.from_config(build, config)


def _parts(name: str) -> Sequence[str]:
    """An adapter's name, of q, k and v."""
    return [name.replace(".qkv_proj.", f".{part}.") for part in QKV]


def _merged(plain: Tensor, first: Tensor, second: Tensor, task: int | None, strength: float) -> Tensor:
    """plain [N, K] + strength * first [tasks, N, r] @ second [tasks, r, K], of one task."""
    if task is None:
        return plain
    return plain.float() + strength * (first[task].float() @ second[task].float())

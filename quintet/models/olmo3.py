"""OLMo 3 (Ai2 2025): OLMo 2 with windows; windowed layers have rotary frequencies of their own."""

from typing import Any

from quintet.layers.build import BuildContext
from quintet.layers.decoder import layer_window
from quintet.layers.rope import Rotary, head_dim
from quintet.models.olmo2 import Olmo2ForCausalLM


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three windowed layers, then one that sees everything."""

    def _attending(self, config: Any, build: BuildContext) -> Any:
        size, trained, kinds = head_dim(config), config.max_position_embeddings, config.layer_types
        rotaries = {k: Rotary(build, size, config.rope_parameters[k], trained) for k in sorted(set(kinds))}
        return lambda index: (layer_window(config, index), rotaries[kinds[index]])

"""GPT (Radford et al. 2018): GPT-2 with norms behind the sums, and none at the end."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.models import gpt2

# entries of GPT-2's config that this family computes in one way
ENTRIES = {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "n_inner": None}


class OpenAIGPTBlock(gpt2.GPT2Block):
    """Attention and feed-forward, each followed by its sum and a norm."""

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        x = self.ln_1(self._ops.add(self.attn(x, cache), x))
        out: Tensor = self.ln_2(self._ops.add(self.mlp(x), x))
        return out


class OpenAIGPTModel(gpt2.GPT2Model):
    """Its last block ends with a norm."""

    block = OpenAIGPTBlock

    def last_norm(self, config: Any, build: BuildContext) -> nn.Module:
        return nn.Identity()


class OpenAIGPTLMHeadModel(CausalLM):
    """The trunk and a head that is tied to the token embedding, as a rule."""

    trunk_name = "transformer"
    renamed_tensors = {"tokens_embed.": "wte.", "positions_embed.": "wpe."}
    ignored_tensors = (*CausalLM.ignored_tensors, r"transformer\.h\.\d+\.attn\.bias", r"transformer\.position_ids")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        for name, value in ENTRIES.items():
            setattr(config, name, value)
        config.activation_function = "gelu_new" if config.afn == "gelu" else config.afn
        self.transformer = OpenAIGPTModel(config, build)
        self.lm_head = LMHead.from_config(build, config, "transformer.wte")

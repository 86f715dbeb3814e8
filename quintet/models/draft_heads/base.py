"""Base of draft heads: what they take of the model that they propose to."""

from typing import Any

from torch import Tensor

from quintet.interface.platform import State
from quintet.interface.types import Batch, Outputs
from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext, replicated
from quintet.layers.decoder import CausalLM, norm_eps, select_output_rows
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import ColumnParallelLinear, LMHead, column_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import head_dim

_TABLES = (r"embed_tokens\.weight", r"lm_head\.weight")  # which the other model has, too


class DraftHead(CausalLM):
    """A token and the hidden state of the token before it -> logits of the token after it, and a hidden state that
    stands for the model's where that has computed none.

    The hidden states are the step's intermediate_tensors. The embedding and the language-model head are the model's
    where the checkpoint has none.
    """

    supports_pipeline = False
    drafts_block = False  # all drafts of a request in one step, at mask tokens
    reads_cache = False  # it keeps nothing, and reads the keys and values that the model's layers keep
    draws_in_turn = False  # a block's logits depend on the token before each, by following()
    starts_at_last_token = False  # the block begins with the last token, and a mask draws its own place's token
    ignored_tensors: tuple[str, ...] = (
        r".*rotary_emb\.inv_freq",
        r"d2t",
        r"t2d",
        r"embed_tokens\.weight",
        r"lm_head\.weight",
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        """`config`: with `has_embedding` and `has_head`, whether the checkpoint has them, and `draft_vocab_size`."""
        super().__init__(build)
        self._build, self._ops = build, build.ops.take("take_rows", "beside", "add")
        self._size: int = config.draft_vocab_size
        if config.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, config.hidden_size)
        if config.has_head:
            self.lm_head = LMHead(build, config.hidden_size, config.draft_vocab_size)
        # modules of the other model, and none of this one: they stand in a tuple
        self._borrowed: tuple[Any, ...] = ()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]  # of what it draws
        return self._size

    def borrow(self, model: CausalLM) -> None:
        """Takes the embedding, the language-model head and the last norm of the model, which it reads where it has none
        of its own. ValueError where the model's family has them otherwise."""
        trunk = model.get_submodule(model.trunk_name)
        parts = [getattr(trunk, name, None) for name in ("embed_tokens", "norm")]
        if None in parts:
            family = type(model).__module__.rpartition(".")[2]
            raise ValueError(f"draft heads are not supported for {family} models; use method 'draft_model' or 'ngram'")
        self._borrowed, self._lora = (*parts, model.lm_head), model.lora_step

    def combine(self, states: Tensor, places: Tensor | None) -> Tensor:
        """Hidden states of several layers side by side [T, N * H] -> [T, H], what a step reads; of one: as they are.
        `places` [T]: embed_indices, of a head that drafts a block: 0 for rows of one kind, -1 for the others."""
        return states

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        cache = StepState(state, batch, self._lora)  # the other model's head may have adapters: these steps name none
        hidden, _ = cache.received_hidden_states(self._build.dtype)
        normalized, following = self.hidden_states(self.embed(batch), hidden, cache)
        return Outputs(self.head(normalized), following), cache.state

    def embed(self, batch: Batch) -> Tensor:
        """Embeddings [T, H] of the step's tokens."""
        embedding = self.embed_tokens if hasattr(self, "embed_tokens") else self._borrowed[0]
        return embedding(batch.token_ids)

    def head(self, x: Tensor) -> Tensor:
        return super().head(x) if hasattr(self, "lm_head") else self._borrowed[2](x)

    def hidden_states(self, embeds: Tensor, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor | None]:
        """Embeddings and hidden states [T, H] -> of the step's rows [L, H]: what the language-model head takes, and
        what stands for the model's hidden state; None where no later draft reads it."""
        raise NotImplementedError

    def rows(self, x: Tensor, cache: StepState) -> Tensor:
        """Selects the step's rows."""
        return select_output_rows(x, cache, self._ops)


def norm_heads(attention: SelfAttention, config: Any, build: BuildContext) -> None:
    """Gives an attention layer the norms of each head's q and k, where the head's file has them."""
    if config.norms_heads:
        attention.q_norm = RMSNorm(build, head_dim(config), norm_eps(config))
        attention.k_norm = RMSNorm(build, head_dim(config), norm_eps(config))


def fusion(build: BuildContext, name: str, inputs: int, outputs: int, bias: bool = False) -> ColumnParallelLinear:
    """Returns the product that joins what a head reads; every rank has all of it."""
    return column_parallel(build, inputs, {name: replicated(outputs, build.size)}, bias)

"""A model of transformers as one of our families: it generates text, or gives hidden states of its trunk."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from quintet.interface.platform import State
from quintet.interface.types import AttentionSpec, Batch, Outputs
from quintet.layers.build import BuildContext
from quintet.layers.decoder import ModelBase
from quintet.layers.layer_state import StepState
from quintet.models.transformers.construct import NAME, Unsupported, constructed, explained, is_encoder
from quintet.models.transformers.layer_replacement import Replacing
from quintet.models.transformers.layers import Attended, Rest, Running
from quintet.models.transformers.tp_plan import TensorParallelPlan
from quintet.models.transformers.trace import (
    TOKENS,
    AttentionCall,
    ForwardTrace,
    accepted_inputs,
    first_position,
    forward_inputs,
    traced,
)
from quintet.models.transformers.weight_names import WeightNames


class TransformersForCausalLM(ModelBase):
    """Runs transformers' forward(): one flat row of tokens, no mask, no cache of its own."""

    config_counts_layers = False  # LongCat-Flash has two attentions in a layer of its files
    recordable = False  # torch's own functions compute a part of it
    _theirs: Any

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        with explained(config, "taking its modules over"):
            self._take_over(config, build)

    def _take_over(self, config: Any, build: BuildContext) -> None:
        """Builds transformers' model, with layers of ours in the places of those that equal them."""
        if build.requested_outputs.aux_hidden_states:
            raise Unsupported(config, "outputs of single layers are not given")
        self._has_logits = build.requested_outputs.logits
        if self.is_encoder and self._has_logits:
            raise ValueError(
                f"{config.model_type} gives hidden states, no logits, and generates nothing; choose a decoder model"
            )
        tied = self._has_logits and build.ties_head(config)
        theirs = constructed(config, build.dtype, build.max_model_len, tied, self._has_logits)
        trace, self._names = traced(theirs, build.max_model_len), WeightNames(theirs)
        self._lora = build.lora
        self._running, self._wanted, self._ops = Running(), build.requested_outputs, build.ops.take("take_rows")
        replacing = Replacing(theirs, build, trace, self._names, self._running)
        self._give_attention(config, build, trace, replacing.plan)
        table: Any = theirs.get_output_embeddings() if self._has_logits else theirs.get_input_embeddings()  # type: ignore[operator]
        self.vocab_size, self._first_position = int(table.weight.shape[0]), trace.first_position
        self._accepted = accepted_inputs(theirs)
        has_segments = "token_type_ids" in self._accepted and config.type_vocab_size > 1
        self.uses_token_types = bool(has_segments and not self._has_logits)
        self.ignored_tensors = _ignored(theirs)
        loose = replacing.replace()
        theirs.set_attn_implementation(NAME)  # type: ignore[operator]
        for name, module in theirs.named_children():
            self.add_module(name, module)
        self.beside = Rest(build, loose)
        self.__dict__["_theirs"] = theirs  # no module of ours: its parts are, under the names that checkpoints have

    def _give_attention(self, config: Any, build: BuildContext, trace: ForwardTrace, plan: TensorParallelPlan) -> None:
        for call in trace.calls:
            held = call.module.__dict__.setdefault("attended", Attended(self._running))
            spec = plan.shared(_spec(call, build, config))
            mixing = build.make_mixer(spec)
            mixing.kv_heads = call.kv_heads
            held.add(mixing, spec.head_dim, call.value_dim)

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        """One step, as of other families."""
        cache, running = StepState(state, batch, self._lora), self._running
        running.begin(cache)
        try:
            ids, positions = batch.token_ids.long()[None], batch.positions.long()[None] + self._first_position
            segments = batch.inputs.token_type_ids
            given = forward_inputs(self._accepted, ids, None if segments is None else segments.long()[None])
            found = self._theirs(position_ids=positions, **given)
            if not self._has_logits:
                hidden = self._ops.take_rows(found.last_hidden_state[0], batch.logits_indices)
                return Outputs(None, hidden), cache.state
            logits = found.logits[0]
            if logits.shape[0] != batch.logits_indices.shape[0] or running.hidden is None:
                logits = self._ops.take_rows(logits, batch.logits_indices)
            return Outputs(logits, running.hidden if self._wanted.hidden_states else None), cache.state
        finally:
            running.end()

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        with explained(self._theirs.config, "reading its tensors' names"):
            return self._names.gathered(entries)


class TransformersEncoder(TransformersForCausalLM):
    """A trunk whose tokens see both ways, and which keeps nothing."""

    is_encoder = True

    @classmethod
    def max_text_length(cls, config: Any) -> int | None:
        """Tokens that the table of positions is for, where they begin behind the padding's."""
        with explained(config, "looking at its positions"):
            trunk = constructed(config, torch.float32, 2 * len(TOKENS), tied=False, has_logits=False)
            first = first_position(trunk, torch.tensor([TOKENS]))
        count: int | None = getattr(config, "max_position_embeddings", None)
        return count - first if first and count else None


def backend_class(config: Any) -> type[TransformersForCausalLM]:
    """Returns the class for a transformers config."""
    return TransformersEncoder if is_encoder(config) else TransformersForCausalLM


def _spec(call: AttentionCall, build: BuildContext, config: Any) -> AttentionSpec:
    if build.causal and not call.seen.causal:
        raise Unsupported(config, "its tokens see those that come after them: it does not generate text")
    return AttentionSpec(
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=max(call.head_dim, call.value_dim),
        scale=call.scale,
        dtype=build.dtype,
        page_size=build.page_size,
        window=call.seen.window,
        softcap=call.softcap,
        sinks=call.sinks,
        kv_dtype=build.kv_dtype,
        causal=build.causal,
        source="self" if build.causal else "none",
    )


def _ignored(theirs: Any) -> tuple[str, ...]:
    """Patterns of tensors that checkpoints may hold and the model does not keep."""
    patterns = [f".*(?:{each}).*" for each in getattr(theirs, "_keys_to_ignore_on_load_unexpected", None) or ()]
    tied = [re.escape(name) for name in getattr(theirs, "all_tied_weights_keys", None) or ()]
    return (r".*rotary_emb\.inv_freq", *patterns, *tied)

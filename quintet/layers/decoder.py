"""The trunk that decoder-only families share: embed, run the blocks, keep the rows that are asked for, normalise."""

import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from quintet.interface.platform import State
from quintet.interface.types import Batch, Outputs
from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.layer_state import LayerMixer, StepState
from quintet.layers.linear import LMHead
from quintet.layers.lora_step import LoRAStep
from quintet.layers.norm import RMSNorm
from quintet.layers.pipeline import Stage, drop_other_layers


class PipelinedTrunk(Protocol):
    """A trunk with layers that pipeline stages can share out."""

    def keep_stage(self, stage: Stage) -> None: ...

    @property
    def blocks(self) -> nn.ModuleList: ...


BlockFactory = Callable[[Any, BuildContext, int], nn.Module]  # (config, build, index) -> a module like PreNormBlock


class DecoderTrunk(nn.Module):
    """A step -> normalised hidden states of its rows [L, H], and the taps that are wanted, [T, H] each.

    `scale` is of the embeddings that are looked up; with `scales_given`, of those that a request brings as well. `norm`
    is the last one, if it is not Llama's.
    """

    def __init__(
        self,
        config: Any,
        build: BuildContext,
        block: BlockFactory,
        scale: float = 1.0,
        norm: nn.Module | None = None,
        scales_input_embeds: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(config, build, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(build, config.hidden_size, norm_eps(config)) if norm is None else norm
        self._ops, self._scale = build.ops.take("take_rows", "scale", "add", "place_rows"), scale
        self._scales_input_embeds, self._build = scales_input_embeds, build

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        return self.layers

    def keep_stage(self, stage: Stage) -> None:
        """Only what the stage has."""
        drop_other_layers(self, stage, ["embed_tokens"], "layers", ["norm"])

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        if not self._build.stage.first:
            return run_residual_layers(self.layers, self.norm, None, cache, self._build)
        x = self.embed_tokens.embed(cache.batch, 1.0 if self._scales_input_embeds else self._scale)
        if self._scales_input_embeds and self._scale != 1.0:
            x = self._ops.scale(x, self._scale)
        return run_residual_layers(self.layers, self.norm, x, cache, self._build, self._deep_rows(cache.batch))

    def _deep_rows(self, batch: Batch) -> dict[int, Callable[[int, Tensor], Tensor]]:
        """Returns what adds the row store's further levels to the inputs of some layers (deepstack)."""
        store, indices = self._build.row_store, batch.inputs.embed_indices
        if store is None or indices is None:
            return {}

        levels = store.levels

        def add_level(index: int, x: Tensor) -> Tensor:
            rows = self._ops.place_rows(torch.zeros_like(x), store.level(levels[index]), indices)
            added: Tensor = self._ops.add(x, rows)
            return added

        return dict.fromkeys(levels, add_level)


def run_residual_layers(
    layers: Iterable[Callable[..., Any]],
    norm: nn.Module,
    x: Tensor | None,
    cache: StepState,
    build: BuildContext,
    input_transforms: Mapping[int, Callable[[int, Tensor], Tensor]] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """x [T, H] through layers that hand their last branch and the residual on apart -> the step's rows, normalised, and
    the taps. `joints` change what goes into some layers. A stage goes through its own; x is None where another has
    handed it on, and what the next one is handed stays in the cache."""
    residual: Tensor | None = None
    if x is None:
        x, residual = cache.received_hidden_states(build.dtype)
    ops, wanted, taps, input_transforms = (
        build.ops,
        build.requested_outputs.aux_hidden_states,
        [],
        input_transforms or {},
    )
    for index, layer in build.stage.select_layers([*layers]):
        if index in wanted or index in input_transforms:
            # add() may have overwritten what it was given
            x, residual = (x if residual is None else ops.add(x, residual)), None
        if index in wanted:
            taps.append(x)
        if index in input_transforms:
            x = input_transforms[index](index, x)
        if layer is not None:
            x, residual = layer(x, residual, cache)
    if not build.stage.last:
        cache.intermediate_tensors = (x,) if residual is None else (x, residual)
        return x, taps
    x = select_output_rows(x, cache, ops)
    if residual is None:
        return norm(x), taps
    return norm(x, select_output_rows(residual, cache, ops))[0], taps


def select_output_rows(x: Tensor, cache: StepState, ops: Any) -> Tensor:
    """Selects the rows of x [T, H] that outputs are computed for -> [L, H]; x itself where all rows are."""
    if cache.lora is not None:
        cache.lora.select_output_rows(ops.take_rows)
    batch = cache.batch
    rows: Tensor = x if batch.one_token_per_request else ops.take_rows(x, batch.logits_indices)
    return rows


def run_layers(
    layers: nn.ModuleList, x: Tensor | None, cache: StepState, build: BuildContext
) -> tuple[Tensor, list[Tensor]]:
    """x [T, H] through layers that keep no residual apart -> what comes out of the last, and the taps; stages as in
    across()."""
    wanted, taps = build.requested_outputs.aux_hidden_states, []
    if x is None:
        x, _ = cache.received_hidden_states(build.dtype)
    for index, layer in build.stage.select_layers([*layers]):
        if index in wanted:
            taps.append(x)
        x = x if layer is None else layer(x, cache)
    if not build.stage.last:
        cache.intermediate_tensors = (x,)
    return x, taps


class PreNormBlock(nn.Module):
    """Llama's block. It hands its last branch and the residual on apart, so that the next norm can add them."""

    def __init__(
        self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module, norm_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, config.hidden_size, norm_eps(config), norm_offset)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, norm_eps(config), norm_offset)
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, cache), residual)
        return self.mlp(x), residual


class SandwichBlock(nn.Module):
    """Gemma's block: norms, kept around 0, before and after each branch."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(build, width, eps, offset=1.0)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(build, width, eps, offset=1.0)
        self.pre_feedforward_layernorm = RMSNorm(build, width, eps, offset=1.0)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(build, width, eps, offset=1.0)

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, cache))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class ModelBase(nn.Module):
    """Base of the families' classes: what the loader must know of their checkpoints' other tensors and names."""

    # traits of a family
    is_encoder: ClassVar[bool] = False  # True: attention is bidirectional, nothing is cached, and there are no logits
    supports_pipeline: bool = False  # True: pipeline stages can share out the layers of the trunk
    recordable: bool = True  # False: a step computes with more than ops, so that their calls alone are not the step
    config_counts_layers: ClassVar[bool] = True  # False: config.json and the files count layers or experts differently
    encoder_class: ClassVar[type | None] = None  # of the encoder whose rows its layers read, too; None: there is none
    reads_towers: ClassVar[bool] = False  # True: its tensors are those of a wrapper's files that no text model has
    uses_token_types: bool = False  # True: tokens have segments (token_type_ids), in the batch's inputs
    trunk_name: ClassVar[str] = "model"  # module that computes hidden states of the step's rows, and taps

    # of a family that an installed package adds
    config_class: ClassVar[type | None] = None  # transformers' PretrainedConfig, where it does not know the model_type
    # what the conformance kit compares with: "package.module:Class" of a PreTrainedModel; None: transformers' own class
    reference_class: ClassVar[str | None] = None
    # its small models: variant -> entries of config.json beside those of sizes.PLAIN
    reference_configs: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    # tensors of a checkpoint
    renamed_tensors: ClassVar[Mapping[str, str]] = {}  # parts of their names -> parts of the modules' names
    ignored_tensors: tuple[str, ...] = ()  # patterns of names that a file may hold and no layer asks for
    ignored_suffixes: tuple[str, ...] = ()  # ends of such names, by the checkpoint's quantization
    gathered_from: ClassVar[tuple[str, ...]] = ()  # names of tensors that gathered() makes the modules' of
    other_stage_tensors: frozenset[str] = frozenset()  # those that layers of other pipeline stages are made of
    vocab_size: int

    # the groups of its layers in each tensor of the state, where a second model of the worker has layers in it, too
    state_groups: Mapping[int, Collection[int]] | None = None

    @property
    def cross_mixers(self) -> Sequence[LayerMixer]:
        """Mixers of its layers that read an encoder's rows, in order."""
        return ()

    @classmethod
    def canonical(cls, name: str) -> str:
        """Returns the name that the modules use for a checkpoint's tensor."""
        for theirs, ours in cls.renamed_tensors.items():
            name = name.replace(theirs, ours, 1)
        return name

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """Returns the modules' names for the parts of a checkpoint's stacked tensor, and where each lies in it."""
        return {}

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """A checkpoint's tensors, by name, where several of them make one of the modules'."""
        return entries

    def drop_lm_head(self) -> None:
        """Called where no logits are wanted: their head is not loaded."""

    def pipeline_trunk(self) -> "PipelinedTrunk":
        """Returns the trunk that pipeline stages share; ValueError where one could not go on from what it receives."""
        if not self.supports_pipeline:
            family = type(self).__module__.rpartition(".")[2]
            how = "take a text in one step" if self.is_encoder else "go through their layers in a way of their own"
            raise ValueError(
                f"pipeline_parallel_size must be 1 for {family} models, which {how}; share each layer out "
                "(tensor_parallel_size), or the requests (data_parallel_size)"
            )
        return cast(PipelinedTrunk, self.get_submodule(self.trunk_name))

    def shared_tensor_widths(self, at: int) -> tuple[int, ...]:
        """Numbers of a token in each tensor that layers from `at` on read of those before it, beside what comes out of
        the last of them: stages hand them on, in this order."""
        return ()

    @classmethod
    def max_text_length(cls, config: Any) -> int | None:
        """Tokens of the longest text, where its positions are counted otherwise than others'."""
        return None

    @property
    def width(self) -> int:
        """Numbers of an embedding that may stand in the place of a token."""
        tables = (each for each in self.modules() if isinstance(each, VocabParallelEmbedding))
        return next(each.width for each in tables if not isinstance(each, PositionEmbedding))


class CausalLM(ModelBase):
    """A trunk and a head: the base of every family that generates."""

    # a head that is tied may be stored again
    ignored_tensors: tuple[str, ...] = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")
    supports_pipeline = True
    model: nn.Module
    lm_head: LMHead

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self._lora = build.lora
        self._routed_experts = build.routed_experts
        self._wanted, self._vocab = build.requested_outputs, 0  # tokens, where there is no head that says so

    @property
    def vocab_size(self) -> int:  # type: ignore[override]  # as long as the head
        return self._vocab or self.lm_head.vocab

    @property
    def lora_step(self) -> LoRAStep | None:
        """Adapters of the step that runs; None: the model takes none."""
        return self._lora

    def drop_lm_head(self) -> None:
        self._vocab = self.vocab_size
        del self.lm_head

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        """Runs one step: the state and T tokens -> the requested outputs, and the new state."""
        cache, routed = StepState(state, batch, self._lora), self._routed_experts
        if routed is not None:
            routed.start()
        x, taps = self.trunk(cache)
        if cache.intermediate_tensors:
            return Outputs(None, intermediate_tensors=cache.intermediate_tensors), cache.state
        logits = self.head(x) if self._wanted.logits else None
        outputs = Outputs(logits, x if self._wanted.hidden_states else None, tuple(taps))
        return (outputs if routed is None else outputs._replace(routed_experts=routed.take())), cache.state

    def trunk(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        """A step -> hidden states of its rows, and taps."""
        out: tuple[Tensor, list[Tensor]] = self.get_submodule(self.trunk_name)(cache)
        return out

    def head(self, x: Tensor) -> Tensor:
        """Hidden states [L, H] -> logits [L, vocab]."""
        logits: Tensor = self.lm_head(x)
        return logits


def norm_eps(config: Any) -> float:
    """Returns the epsilon of a model's norms, under the names that configs have for it."""
    names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    eps: float = next(getattr(config, name) for name in names if hasattr(config, name))
    return eps


def layer_window(config: Any, index: int) -> int | None:
    """The layer's window in tokens, by the checkpoint's layer_types; None: it sees all."""
    if not hasattr(config, "layer_types"):  # of text models in wrappers (Qwen3-VL), which have no windows
        refuse(config, "sliding_window")
        return None
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


def require(config: Any, entries: Mapping[str, Any]) -> None:
    """ValueError if the checkpoint says otherwise: of entries that transformers does not read, these are computed."""
    for name, value in entries.items():
        if (configured := getattr(config, name, None)) not in (None, value):
            raise ValueError(f"{config.model_type} with {name}={configured!r} is not supported; it has {value!r}")


def refuse_long_chunks(config: Any, build: BuildContext) -> None:
    """ValueError where positions begin anew within requests that are served (dual chunk attention, An et al. 2024, of
    Qwen2.5-1M): shorter ones are in one chunk, and attention is plain."""
    configured = getattr(config, "dual_chunk_attention_config", None)
    if not configured:
        return
    size, local = (
        configured.get(name) if isinstance(configured, Mapping) else None for name in ("chunk_size", "local_size")
    )
    if type(size) is not int or type(local) is not int:
        raise ValueError(
            f"{config.model_type}'s dual_chunk_attention_config is {reprlib.repr(configured)}, not an object with "
            "whole numbers chunk_size and local_size; correct config.json"
        )
    most = size - local
    if build.max_model_len > most:
        raise ValueError(
            f"{config.model_type} with dual_chunk_attention_config attends within chunks of {most} tokens and between "
            f"them, which is not computed here: requests of up to {most} tokens are in one; set max_model_len to "
            f"{most} or less, and not {build.max_model_len}"
        )


def rounded(value: float, dtype: torch.dtype) -> float:
    """As the type would hold it: some checkpoints were trained with a constant rounded so."""
    return torch.tensor(value, dtype=dtype).item()

"""All decisions of an engine, before a weight is read."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quintet.config import EngineConfig
from quintet.engine.encoder import factory as encoders
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.shape_buckets import plan_buckets
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.media.factory import ServedMedia, taken_media
from quintet.engine.memory_planner import MemoryPlan
from quintet.engine.observability.profiler import Profiler
from quintet.engine.pooling.factory import bounds_of
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.engine.sizing import largest_step
from quintet.hub.pooling_task import Pooling
from quintet.interface.platform import Capabilities, Platform
from quintet.interface.types import ShapeBucket
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.encoder_text import TextInput
from quintet.media.families import MediaModel
from quintet.media.input import MediaInput


@dataclass(frozen=True)
class EnginePlan:
    """All decisions, before a weight is read."""

    config: EngineConfig  # as the platform settled it
    platform: Platform
    capabilities: Capabilities
    reasons: tuple[str, ...]  # of everything that was decided and not asked for
    folder: Path
    hf_config: Any
    generation: dict[str, Any]  # sampling defaults, and eos_token_id
    sizes: ModelSizes
    ranks: WorkerGroup
    memory_plan: MemoryPlan
    pooling: Pooling | None  # how its hidden states become numbers; None: it generates text
    unproven_features: str  # what of this no conformance report vouches for; empty if all is proven
    profiler: Profiler
    served_media: ServedMedia

    @property
    def vocab_size(self) -> int:
        return self.ranks.workers[0].model.vocab_size

    @property
    def pooling_bounds(self) -> PoolingBounds | None:
        """Limits of pooling requests; None if the model generates."""
        return None if self.pooling is None else bounds_of(self.pooling, self.hf_config, self.memory_plan.max_model_len)

    @property
    def fixed_shapes(self) -> tuple[ShapeBucket, ...]:
        """The sizes of all steps, where the device wants fixed shapes."""
        if not self.capabilities.static_shapes:
            return ()
        sizes = plan_buckets(largest_step(self.config, self.ranks.workers[0], self.memory_plan.max_model_len))
        return tuple(each._replace(inputs=self.inputs) for each in sizes)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Fields of Inputs that steps may bring; where shapes are fixed, all do."""
        model = self.ranks.workers[0].model
        types = model.uses_token_types and self.pooling is not None
        rows = self.sizes.row_store
        there = {"embed_indices": rows is not None, "token_type_ids": types}
        there["until"] = rows is not None and (rows.whole_runs or rows.whole_prompts)
        there |= dict.fromkeys(("adapters", "adapter_extras"), self.config.enable_lora)
        return tuple(name for name, wanted in there.items() if wanted)

    @cached_property
    def encoder(self) -> SpeechInput | TextInput | None:
        """Media or text that a request has for the model's encoder; None: it has none."""
        aligns = not self.capabilities.ops_only  # Aligner looks at what a step computes
        return encoders.encoder_input(self.folder, self.hf_config, self.ranks.workers[0], aligns)

    @property
    def media(self) -> MediaModel | None:
        """Facts about media for processes that admit requests; None: they are refused."""
        return self.served_media.model(self.config, self.folder, self.sizes.row_store)

    @property
    def taken_media(self) -> MediaInput | SpeechInput | TextInput | str:
        """Input of media for prompts of the Python API, or why they may have none."""
        return taken_media(self.config, self.media, self.encoder, self.served_media.why)

    @property
    def embeds_width(self) -> int:
        """Numbers of an embedding that a prompt may have in the place of a token; 0: none may be there."""
        return self.ranks.workers[0].model.width if self.config.enable_prompt_embeds else 0

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """The sizes of steps that are compiled, or captured."""
        return self.fixed_shapes or self.memory_plan.buckets

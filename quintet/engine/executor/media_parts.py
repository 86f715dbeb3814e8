"""Encoders of requests' media on a worker.

A tower's rows stand in the places of tokens. Rows of an encoder-decoder model's encoder are read by the decoder.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from quintet.engine.executor.batch_builder import pad
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.shape_buckets import plan_buckets
from quintet.interface.platform import Capabilities, SingleRank
from quintet.interface.types import FloatArray, HostBatch, HostGroup, HostInputs, IntArray, ShapeBucket
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.media.items import MediaItem
from quintet.model_loader.incoming import Incoming
from quintet.model_loader.incoming_parts import IncomingParts
from quintet.model_loader.weight_files import WeightFiles
from quintet.models.encoders.base import CrossEncoder
from quintet.ops import bind
from quintet.platforms import choose

if TYPE_CHECKING:
    from quintet.engine.executor.tower_part import TowerPart
    from quintet.engine.executor.worker import Worker


def make_tower(worker: "Worker", sizes: ModelSizes) -> "TowerPart | None":
    """Makes the encoder of media, on a rank that embeds tokens."""
    if sizes.tower is None or worker.row_store is None:
        return None
    from quintet.engine.executor.tower_part import TowerPart

    own = read_quantization_config(sizes.tower.quantization)
    build = replace(worker.main.build, lora=None, row_store=None)
    if not worker.platform.encoder_platform:
        build = replace(build, quantization=build.quantization.for_encoder(own))
        return TowerPart(worker.platform, sizes.tower, build, worker.rank_info.rank)
    host = choose(worker.platform.encoder_platform).platform()
    host.open(0)
    plan = QuantizationPlan(supported_kinds=None).for_encoder(own)
    build = replace(build, ops=bind(host.op_priority), comm=SingleRank(), quantization=plan)
    return TowerPart(host, sizes.tower, build, worker.rank_info.rank)


def run_tower(worker: "Worker", item: MediaItem, places: IntArray) -> None:
    """Encodes a medium, and writes its rows to these places of the row store."""
    if worker.tower is not None and worker.row_store is not None:
        rows = worker.tower.encode(item)
        if worker.tower.platform is worker.platform:
            worker.row_store.write_levels(rows, places)
        else:
            worker.row_store.write(worker.platform, worker.device, places, rows[0].float().numpy())


@torch.inference_mode()
def run_encoder(worker: "Worker", given: FloatArray | IntArray, slots: IntArray) -> None:
    """Runs the encoder's pass of one item, its token ids [E], or its numbers as the encoder takes them; K and V of its
    rows go to these slots [E] of the pages that the decoder's layers read."""
    assert worker.encoder is not None, "this worker has no encoder"
    groups = worker.kv_cache_layout
    batch = encoder_batch(given, slots, len(groups.indices), len(groups.groups))
    worker.run_pass(worker.encoder, pad(batch, worker.encoder_buckets) if worker.encoder_buckets else batch)


def encoder_buckets(worker: "Worker") -> tuple[ShapeBucket, ...]:
    """Returns the sizes of the encoder's passes, where shapes are fixed. All audio is of one size."""
    if worker.encoder is None:
        return ()
    facts, model = worker.platform.probe(), cast(CrossEncoder, worker.encoder.model)
    if not (isinstance(facts, Capabilities) and facts.static_shapes):
        return ()
    largest = ShapeBucket(model.rows, 1, 0, (1,) * len(worker.kv_cache_layout.indices))
    if model.takes_text:
        return plan_buckets(largest)
    if not model.mel_bins:
        raise ValueError(
            "the encoder's passes follow the length of the audio, and steps here have fixed shapes; run "
            "this model with device='cpu'"
        )
    return (largest._replace(inputs=("embeds",), embed_rows=model.frames, width=model.mel_bins),)


def reload_parts(worker: "Worker", folder: Path | WeightFiles | None) -> None:
    """Overwrites the weights of the model and of what encodes its media. Files that do not fit are refused before
    anything is overwritten."""
    if worker.encoder is not None:
        worker.encoder.check_files(folder)
    tower = None if worker.tower is None else worker.tower.reading(folder)
    worker.main.reload(folder)
    if worker.encoder is not None:
        worker.encoder.reload(folder)
    if tower is not None and worker.tower is not None:
        tower.overwrite(worker.tower.platform)


def incoming_parts(worker: "Worker") -> IncomingParts:
    """Begins an update of the weights of the model and of what encodes its media."""
    parts = [Incoming(part.model, worker.platform) for part in (worker.main, worker.encoder) if part is not None]
    if worker.tower is not None:
        parts.append(Incoming(worker.tower.model, worker.tower.platform, worker.tower.model.module_name))
    return IncomingParts(parts)


def encoder_batch(given: Any, slots: IntArray, num_groups: int, group: int) -> HostBatch:
    """Returns the batch of one pass: a token for each row, which goes to its slot [E] in the group's pages."""
    is_text = given.ndim == 1
    rows = len(slots)
    nothing, one = np.zeros(rows, np.int32), np.zeros((1, 1), np.int32)
    lengths = np.array([rows], np.int32)
    groups = [HostGroup(slots if index == group else nothing, one, lengths) for index in range(num_groups)]
    return HostBatch(
        token_ids=given if is_text else nothing,
        positions=np.arange(rows, dtype=np.int32),
        token_to_seq=nothing,
        query_start_loc=np.array([0, rows], np.int32),
        logits_indices=np.zeros(0, np.int32),
        groups=tuple(groups),
        inputs=HostInputs() if is_text else HostInputs(embeds=given),
    )

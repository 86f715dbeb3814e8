"""The encoder of a worker, which makes rows of the row store of media: a part beside the main model."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet import __version__
from quintet.config.media.ec_transfer import ECTransferConfig
from quintet.engine.executor.model_part import drop_tensors
from quintet.engine.row_store.shared_rows import SharedRows, identity_of
from quintet.interface.platform import Capabilities, Platform
from quintet.layers.build import BuildContext, finalize
from quintet.media.items import ROWS, MediaItem
from quintet.model_loader.loader import ParameterLoad, load, num_bytes
from quintet.model_loader.weight_files import WeightFiles
from quintet.models.transformers.tower import MediaTower


@dataclass(frozen=True)
class TowerSizes:
    """The wrapper that media are encoded by."""

    hf_config: Any  # transformers' object
    deep_layers: tuple[int, ...] = ()  # of the text model, whose inputs rows of media are added to (deepstack)
    transfer: ECTransferConfig = ECTransferConfig()  # how engines share rows
    quantization: Any = None  # quantization_config of an encoder in a file of its own


class TowerPart:
    """The towers of a worker. Built empty, so that the memory plan can ask for sizes; read() then fills it."""

    def __init__(self, platform: Platform, sizes: TowerSizes, build: BuildContext, rank: int) -> None:
        """`rank`: of its files."""
        self.platform, self.model, self._rank = platform, MediaTower(sizes.hf_config, build), rank
        self._sizes = sizes
        self._shared: SharedRows | None = None  # of the weights as they are; None: not yet asked, or weights are new
        finalize(self.model)
        self._folder: Path | WeightFiles | None = None
        self._dropped = False  # the weights, by sleep()
        self._threads = (
            torch.get_num_threads()
        )  # before the model's steps, whose products may be ours, take all but one

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on this device."""
        return num_bytes(self.model, self.platform)

    def read(self, folder: Path | WeightFiles | None, progress: bool) -> None:
        """Reads the weights from the checkpoint as it is now; random ones without a folder."""
        self._folder, self._shared = folder, None
        load(self.model, self.platform, _of_encoders(folder), progress, self._rank)
        self._dropped = False

    def encode(self, item: MediaItem) -> tuple[Tensor, ...]:
        """Returns the rows of a medium (see MediaTower), or those that another engine has made of it."""
        if self._sizes.transfer.ec_connector is None or ROWS in item.fields:
            return self._computed(item)
        self._shared = self._shared or SharedRows(self._sizes.transfer, self._identity())
        width = self._sizes.hf_config.get_text_config().hidden_size
        rows = self._shared.load(item, 1 + len(self._sizes.deep_layers), width)
        if rows is None:
            rows = self._computed(item)
            self._shared.save(item, rows)
        device = next(self.model.parameters()).device
        return tuple(each.to(device) for each in rows)

    def _identity(self) -> bytes:
        """Returns a digest of all that rows of a medium follow from, beside the medium."""
        facts = self.platform.probe()
        detail = facts.detail.partition(";")[0] if isinstance(facts, Capabilities) else ""  # without numbers of threads
        known = [self._sizes.hf_config.to_dict(), self.platform.name, detail, __version__, version("transformers")]
        return identity_of(known, self.model.state_dict().items())

    def weights_changed(self) -> None:
        """Rows of the weights that were there before are not these weights'."""
        self._shared = None

    def _computed(self, item: MediaItem) -> tuple[Tensor, ...]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self.model.encode(item)
        finally:
            torch.set_num_threads(before)

    def wake(self) -> None:
        """Reads dropped weights again."""
        if self._dropped:
            self.read(self._folder, progress=False)

    def drop_weights(self) -> int:
        """Drops the weights -> the bytes that they took."""
        self._dropped, self._shared = True, None
        return drop_tensors(self.model)

    def reading(self, folder: Path | WeightFiles | None) -> ParameterLoad:
        """Returns the weights of a folder, to be written over those that are there. ValueError if they do not fit."""
        found = ParameterLoad(self.model, _of_encoders(folder))
        self._folder, self._shared = folder, None
        return found


def _of_encoders(folder: Path | WeightFiles | None) -> Path | WeightFiles | None:
    """Returns the files of encoders, which a GGUF model has apart."""
    return folder.of_encoders if isinstance(folder, WeightFiles) else folder

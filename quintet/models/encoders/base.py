"""Base of encoders whose rows a decoder's layers read by cross-attention."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from quintet.interface.platform import State
from quintet.interface.types import Batch, MaxShape, Outputs, ShapeBucket
from quintet.layers.decoder import ModelBase
from quintet.layers.layer_state import LayerMixer, StepState


class CrossEncoder(ModelBase):
    """One item of media -> K and V of each row and decoder layer, in the pages of the decoder's cross-attention.

    A step encodes one item: its batch has one token for each row. The item is these tokens, or the step's embeds.
    """

    supports_pipeline = False
    vocab_size = 1  # it draws nothing
    takes_text: ClassVar[bool] = False  # True: items are token ids; False: audio
    has_timestamps: ClassVar[bool] = False  # True: its decoder gives times, and heads of it follow the audio (Whisper)
    mel_bins: int = 0  # of the features that it takes; 0: it takes text, or samples
    rows: int  # that an item has at most
    frames: int = 0  # of what a pass brings of audio, where all audio has one length: [frames, mel_bins]
    cross: nn.ModuleList  # of CrossProjection: K and V of each decoder layer

    def __init__(self) -> None:
        super().__init__()
        self._cross_mixers: Sequence[LayerMixer] = ()

    @property
    def cross_mixers(self) -> Sequence[LayerMixer]:
        """Mixers of the decoder's layers, which are no part of this model."""
        return self._cross_mixers

    def borrow(self, mixers: Sequence[LayerMixer]) -> None:
        """Takes the mixers of the decoder's layers, for which it writes K and V."""
        self._cross_mixers = mixers

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        """Runs the pass of one item: the state -> no outputs, and the new state."""
        cache = StepState(state, batch)
        self.write(self.encode(cache), cache)
        return Outputs(None), cache.state

    def encode(self, cache: StepState) -> Tensor:
        """The item of a step -> hidden states [E, H]."""
        raise NotImplementedError

    def write(self, x: Tensor, cache: StepState) -> None:
        """Writes K and V of hidden states [E, H] for each of the decoder's layers."""
        for mixer, project in zip(self.cross_mixers, self.cross, strict=True):
            k, v = project(x)
            mixer.keep(k, v, cache)


def encoder_shape(model: ModelBase, largest: MaxShape) -> MaxShape:
    """Returns the shape of an encoder's pass, for a model whose steps have the given one at most."""
    assert isinstance(model, CrossEncoder), "only an encoder has passes"
    return MaxShape(ShapeBucket(2 * model.rows, 1, 0, ()), largest.hidden, 0)

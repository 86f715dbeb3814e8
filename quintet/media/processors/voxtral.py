"""Voxtral's processor of texts with recordings.

transformers' own takes recordings in chats alone, which it writes through the package mistral-common. Counts and
features are the same here: a recording is filled up to whole windows of 30 s, and each window has as many tokens as
its encoder makes rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

AUDIO_TOKEN = "[AUDIO]"
TEKKEN = "tekken.json"  # Mistral's tokenizer, where the folder has no other
WINDOWS = "num_windows"  # field of a recording


class WindowedFeatures:
    """Log-mel features of recordings, in windows of equal length."""

    def __init__(self, extractor: Any) -> None:
        """`extractor`: transformers' WhisperFeatureExtractor."""
        self._extractor = extractor
        self.sampling_rate: int = extractor.sampling_rate
        self.chunk_length: float = extractor.chunk_length

    def __call__(self, audio: Sequence[NDArray[np.float32]], **options: Any) -> dict[str, Any]:
        """Returns input_features [windows, mels, frames] of all recordings, and how many windows each has."""
        options.pop("return_tensors", None)
        found = [self._windows(each, options) for each in audio]
        return {"input_features": np.concatenate(found), WINDOWS: np.array([len(each) for each in found])}

    def _windows(self, samples: NDArray[np.float32], options: dict[str, Any]) -> NDArray[np.float32]:
        whole = self._extractor.n_samples
        made = self._extractor(
            samples, padding=True, truncation=False, pad_to_multiple_of=whole, return_tensors="np", **options
        )
        features: NDArray[np.float32] = made["input_features"][0]
        return features.reshape(len(features), -1, self._extractor.nb_max_frames).transpose(1, 0, 2)


class VoxtralTextProcessor:
    """Tokens of texts, in which each placeholder stands for a recording, and the recordings' features."""

    audio_token = AUDIO_TOKEN

    def __init__(self, tokenizer: Any, extractor: Any, rows: int) -> None:
        """`rows`: of the encoder, for each window."""
        self.tokenizer, self.feature_extractor, self._rows = tokenizer, WindowedFeatures(extractor), rows

    def __call__(
        self, text: str, audio: Sequence[Any] = (), add_special_tokens: bool = True, **options: Any
    ) -> dict[str, Any]:
        """Returns input_ids and the features. TypeError for an option that the feature extractor does not take."""
        options.pop("return_tensors", None)
        found = self.feature_extractor(audio, **options) if len(audio) else {}
        first, *others = text.split(self.audio_token)
        counts = [int(each) * self._rows for each in found.get(WINDOWS, ())]
        expanded = "".join(self.audio_token * count + part for count, part in zip(counts, others, strict=True))
        return {**found, "input_ids": self.tokenizer(first + expanded, add_special_tokens=add_special_tokens).input_ids}


def load_voxtral(folder: str) -> VoxtralTextProcessor:
    """Returns the processor of a folder."""
    from transformers import AutoConfig, AutoFeatureExtractor

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    audio = AutoConfig.from_pretrained(folder, **options).audio_config
    rows = audio.max_source_positions * audio.hidden_size // audio.intermediate_size
    extractor = AutoFeatureExtractor.from_pretrained(folder, **options)
    return VoxtralTextProcessor(_tokenizer(Path(folder), options), extractor, rows)


def _tokenizer(folder: Path, options: dict[str, Any]) -> Any:
    """Returns the tokenizer that the engine reads, too: of tokenizer.json, or of Mistral's file."""
    if (folder / TEKKEN).is_file() and not (folder / "tokenizer.json").is_file():
        from transformers.integrations.mistral import convert_tekken_tokenizer

        return convert_tekken_tokenizer(str(folder / TEKKEN))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), **options)

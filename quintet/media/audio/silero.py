"""Speech by Silero's voice activity model, where faster-whisper's package, which brings its ONNX file, is installed.

Unlike energy, it tells voices from music and noise. Source of its inputs: snakers4/silero-vad, version 6: 512 samples
at 16 kHz behind 64 of those before, and two states.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.media.audio.resample import Samples
from quintet.media.audio.silence import DEFAULTS, Span, SpeechThresholds, joined_spans
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEP, CONTEXT = 512, 64  # samples
STATE = (1, 1, 128)
BEGINS, GOES_ON = 0.5, 0.35  # probabilities at which speech begins, and below which it ends
_BLOCK = 2**12  # steps that are computed at a time: two minutes
_INPUTS = {"input", "h", "c"}


def is_installed() -> bool:
    """Returns whether onnxruntime and the model are installed."""
    return importlib.util.find_spec("onnxruntime") is not None and _model_file() is not None


def find_speech_silero(samples: Samples, limits: SpeechThresholds = DEFAULTS) -> list[Span]:
    """Returns the spans that hold speech; of the limits `shortest`, `gap` and `margin` count. ValueError where the
    packages are not installed."""
    if not len(samples):
        return []
    loud = _hysteresis(speech_probabilities(samples))
    return joined_spans(loud, STEP, len(samples), limits)


def speech_probabilities(samples: Samples) -> NDArray[np.float32]:
    """Returns the probability of speech for each 512 samples, the last filled up with silence."""
    session = _session()
    steps = np.pad(samples, (CONTEXT, -len(samples) % STEP))
    windows = np.lib.stride_tricks.sliding_window_view(steps, CONTEXT + STEP)[::STEP]
    h, c, found = np.zeros(STATE, np.float32), np.zeros(STATE, np.float32), []
    for first in range(0, len(windows), _BLOCK):
        block = np.ascontiguousarray(windows[first : first + _BLOCK], dtype=np.float32)
        output, h, c = session.run(None, {"input": block, "h": h, "c": c})
        found.append(np.asarray(output, np.float32).reshape(-1))
    return np.concatenate(found)


def _hysteresis(probabilities: NDArray[np.float32]) -> NDArray[np.bool_]:
    marks, inside = np.zeros(len(probabilities), bool), False
    for index, each in enumerate(probabilities.tolist()):
        inside = each >= (GOES_ON if inside else BEGINS)
        marks[index] = inside
    return marks


def _model_file() -> Path | None:
    package = importlib.util.find_spec("faster_whisper")
    folders = (package.submodule_search_locations or []) if package is not None else []
    return next((each for folder in folders for each in sorted(Path(folder).glob("assets/silero_vad*.onnx"))), None)


@functools.cache
def _session() -> Any:
    """Returns the model, on one thread: requests run beside one another."""
    file = _model_file()
    if file is None or not is_installed():
        raise ValueError(
            "Silero's model of speech comes with faster-whisper and onnxruntime, which are not installed: "
            "pip install faster-whisper onnxruntime, or find speech by its energy"
        )
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    if {each.name for each in session.get_inputs()} != _INPUTS:
        raise ValueError(f"{file} has other inputs than Silero's model of version 6; install faster-whisper>=1.2")
    return session

"""faster-whisper as a process of benchmarks/speech.py: a JSON line for each order, and one for each answer.

Runs with the interpreter of an environment that has faster-whisper, and imports nothing of quintet.
"""

import json
import sys
import time
import wave
from typing import Any

import numpy as np
from faster_whisper import BatchedInferencePipeline, WhisperModel

RATE = 16_000


def samples_of(path: str) -> Any:
    """Returns the samples of a WAV file with 16 bits and one channel, float32 from -1 to 1."""
    with wave.open(path) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 2**15


def transcribe(model: WhisperModel, samples: Any, count: int, language: str) -> list[str]:
    """Returns the text of each of `count` copies of the samples, each one window, greedily and with timestamps."""
    options = {"language": language, "beam_size": 1, "temperature": 0.0, "condition_on_previous_text": False}
    seconds = len(samples) / RATE
    clips = [{"start": index * seconds, "end": (index + 1) * seconds} for index in range(count)]
    segments, _ = BatchedInferencePipeline(model).transcribe(
        np.tile(samples, count), batch_size=count, vad_filter=False, clip_timestamps=clips, without_timestamps=False,
        **options,
    )  # fmt: skip
    texts = [""] * count
    for each in segments:
        texts[min(int((each.start + 0.01) // seconds), count - 1)] += each.text
    return texts


def main() -> None:
    """Loads the model of the first order, and answers the others."""
    start = json.loads(sys.stdin.readline())
    model = WhisperModel(start["model"], device="cpu", compute_type=start["form"], cpu_threads=start["threads"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        samples = samples_of(order["wav"])
        begun = time.perf_counter()
        texts = transcribe(model, samples, order["count"], order["language"])
        print(json.dumps({"seconds": time.perf_counter() - begun, "texts": texts}), flush=True)


if __name__ == "__main__":
    main()

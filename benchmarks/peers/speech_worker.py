"""One peer of benchmarks/speech.py in a process: a JSON line for each order, and one for each answer.

python speech_worker.py ENGINE     (faster-whisper, whisper.cpp or openvino)

Runs with the interpreter of an environment that has the peer, and imports nothing of quintet. All decode greedily with
timestamps. whisper.cpp and OpenVINO have no batches: they take one window after the other.
"""

import importlib
import json
import os
import sys
import time
import wave
from collections.abc import Callable
from typing import Any

import numpy as np

RATE = 16_000
Transcribe = Callable[[Any, int], list[str]]  # samples of a window, and the number of its copies


def samples_of(path: str) -> Any:
    """Returns the samples of a WAV file with 16 bits and one channel, float32 from -1 to 1."""
    with wave.open(path) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 2**15


def faster_whisper(start: dict[str, Any]) -> Transcribe:
    """Makes faster-whisper's batched pipeline; one window goes through it, too."""
    library = importlib.import_module("faster_whisper")
    model = library.WhisperModel(start["model"], device="cpu", compute_type=start["form"], cpu_threads=start["threads"])
    options = {
        "language": start["language"], "beam_size": 1, "temperature": 0.0, "condition_on_previous_text": False,
        "vad_filter": False, "without_timestamps": False,
    }  # fmt: skip

    def transcribe(samples: Any, count: int) -> list[str]:
        seconds = len(samples) / RATE
        clips = [{"start": index * seconds, "end": (index + 1) * seconds} for index in range(count)]
        segments, _ = library.BatchedInferencePipeline(model).transcribe(
            np.tile(samples, count), batch_size=count, clip_timestamps=clips, **options
        )
        texts = [""] * count
        for each in segments:
            texts[min(int((each.start + 0.01) // seconds), count - 1)] += each.text
        return texts

    return transcribe


def whisper_cpp(start: dict[str, Any]) -> Transcribe:
    """Makes a model of whisper.cpp, by pywhispercpp."""
    model = importlib.import_module("pywhispercpp.model").Model(
        start["model"], redirect_whispercpp_logs_to=None, n_threads=start["threads"], language=start["language"],
        temperature=0.0, temperature_inc=0.0, print_progress=False,
    )  # fmt: skip

    def transcribe(samples: Any, count: int) -> list[str]:
        return [" ".join(each.text for each in model.transcribe(samples)) for _ in range(count)]

    return transcribe


def openvino(start: dict[str, Any]) -> Transcribe:
    """Makes a pipeline of OpenVINO GenAI."""
    library = importlib.import_module("openvino_genai")
    pipeline = library.WhisperPipeline(start["model"], "CPU", INFERENCE_NUM_THREADS=start["threads"])
    options: dict[str, Any] = {"return_timestamps": True, "max_new_tokens": 224}
    if start["multilingual"]:
        options |= {"language": f"<|{start['language']}|>", "task": "transcribe"}

    def transcribe(samples: Any, count: int) -> list[str]:
        window = samples.tolist()
        return [pipeline.generate(window, **options).texts[0] for _ in range(count)]

    return transcribe


ENGINES = {"faster-whisper": faster_whisper, "whisper.cpp": whisper_cpp, "openvino": openvino}


def main() -> None:
    """Loads the model of the first order, and answers the others."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the error stream
    transcribe = ENGINES[sys.argv[1]](json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        samples = samples_of(order["wav"])
        begun = time.perf_counter()
        texts = transcribe(samples, order["count"])
        print(json.dumps({"seconds": time.perf_counter() - begun, "texts": texts}), file=answers, flush=True)


if __name__ == "__main__":
    main()

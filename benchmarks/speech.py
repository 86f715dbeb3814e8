"""Measures transcription beside peers: one window of 30 s, and 16 of them at once.

python -m benchmarks.speech MODEL --peer NAME=PYTHON ... [--wav FILE] [--out benchmarks/results/speech.json]

MODEL is a CTranslate2 folder. Peers are faster-whisper, which reads the same folder, whisper.cpp (pywhispercpp) and
openvino (openvino-genai, and optimum-intel to convert); PYTHON is the interpreter of an environment with them. Files
of the other two are written first, into --work: whisper.cpp's in float16, as they are published, or Q8_0, OpenVINO's
with weights in float32 or in 8 bits. All answer in turn, so that a busy machine slows them alike; a figure is the best
of the rounds. All decode greedily with timestamps, from samples in memory: features, encoder and decoder are measured,
the reading of files is not. Without --wav, espeak-ng speaks the text.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import speech_files
from benchmarks.peers.lines import Peer
from quintet import LLM, SamplingParams
from quintet.media.audio.resample import Samples, resample
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

RESULTS = Path(__file__).parent / "results"
RATE, SECONDS = 16_000, 30
TEXT = (
    "The committee met on Tuesday to discuss the harbour. Ships had waited outside for eleven days, and the price of "
    "grain had risen by a third. A young engineer proposed a second crane, which would unload twice as fast. Others "
    "wanted to repair the old one first. In the end they agreed to do both, and to pay for it with a small fee on "
    "every container. The work begins in April, if the weather allows it. Nobody asked the fishermen, who had their "
    "own ideas."
)
"""Read aloud it takes about half a minute."""


class Transcriber(Peer):
    """A peer that transcribes."""

    script = "speech_worker.py"

    def transcribe(self, wav: Path, count: int) -> tuple[float, list[str]]:
        """Returns seconds and texts of so many copies."""
        answer = self.ask({"wav": str(wav), "count": count})
        return answer["seconds"], answer["texts"]


def file_of(peer: str, python: str, model: Path, form: str, work: Path) -> Path:
    """Returns what the peer reads, written if it is not there."""
    if peer == "faster-whisper":
        return model
    target = work / f"{model.name}-{form}.{'bin' if peer == 'whisper.cpp' else 'openvino'}"
    if not target.exists():
        if peer == "whisper.cpp":
            speech_files.ggml(model, form, target)
        else:
            speech_files.openvino(model, form, target, python)
    return target


def transcribe(llm: LLM, samples: Samples, count: int, multilingual: bool) -> tuple[float, list[str]]:
    """Returns seconds and texts of so many copies, none of which finds another's encoded audio."""
    llm.reset_prefix_cache()
    start = "<|startoftranscript|>" + "<|en|><|transcribe|>" * multilingual
    prompts = [
        {"prompt": start, "multi_modal_data": {"audio": samples}, "cache_salt": f"{time.monotonic()} {index}"}
        for index in range(count)
    ]
    begun = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=224), use_tqdm=False)
    return time.perf_counter() - begun, [output.outputs[0].text for output in outputs]


def spoken(folder: Path) -> Path:
    """Returns a WAV file of TEXT."""
    command = shutil.which("espeak-ng") or shutil.which("espeak")
    if command is None:
        raise SystemExit("espeak-ng is not installed; give --wav FILE (16 kHz, mono, 16 bits)")
    subprocess.run([command, "-s", "150", "-w", str(folder / "raw.wav"), TEXT], check=True)
    with wave.open(str(folder / "raw.wav")) as file:
        rate, raw = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), np.int16)
    samples = resample(raw.astype(np.float32) / np.float32(2**15), rate, RATE)[: RATE * SECONDS]
    whole = np.zeros(RATE * SECONDS, np.float32)
    whole[: len(samples)] = samples
    with wave.open(str(folder / "spoken.wav"), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((whole * (2**15 - 1)).astype(np.int16).tobytes())
    return folder / "spoken.wav"


def read(wav: Path) -> Samples:
    """Returns the samples of a WAV file, float32 from -1 to 1."""
    with wave.open(str(wav)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{wav} must have 16 kHz, one channel and 16 bits")
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / np.float32(2**15)


def measure(args: argparse.Namespace, wav: Path) -> list[dict[str, Any]]:
    """Returns a row for each form of the weights and number of windows."""
    rows, multilingual = [], not args.model.name.endswith(".en")
    for form in args.forms:
        settings: dict[str, Any] = {"quantization": "int8"} if form == "int8" else {}
        llm = LLM(
            str(args.model), device="cpu", dtype="float32", max_num_seqs=max(args.counts), use_tqdm=False, **settings
        )
        start = {"form": form, "threads": threads(), "language": "en", "multilingual": multilingual}
        peers = [
            Transcriber(name, python, {**start, "model": str(file_of(name, python, args.model, form, args.work))})
            for name, python in args.peer
        ]
        for count in args.counts:
            rows.append({"form": form, "windows": count, **_row(llm, peers, wav, count, args)})
            print(rows[-1], flush=True)
        for peer in peers:
            peer.close()
        del llm
    return rows


def _row(llm: LLM, peers: list[Transcriber], wav: Path, count: int, args: argparse.Namespace) -> dict[str, Any]:
    samples, multilingual = read(wav), not args.model.name.endswith(".en")
    seconds: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    for _ in range(args.rounds):
        taken = {"quintet": transcribe(llm, samples, count, multilingual)}
        taken |= {peer.name: peer.transcribe(wav, count) for peer in peers}
        for name, (each, found) in taken.items():
            seconds.setdefault(name, []).append(each)
            texts[name] = found[0]
    best = {name: round(min(each), 3) for name, each in seconds.items()}
    ratios = [min(each) / own for own, *each in zip(*seconds.values(), strict=True)]
    return {
        "seconds": best,
        "ratio": round(min(best[peer.name] for peer in peers) / best["quintet"], 2),  # to the best peer
        "least_most": [round(min(ratios), 2), round(max(ratios), 2)],  # of the rounds
        "same_words": {name: _words(text) == _words(texts["quintet"]) for name, text in texts.items()},
    }


def _words(text: str) -> list[str]:
    return "".join(each if each.isalnum() else " " for each in text.lower()).split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--peer", required=True, action="append", type=lambda given: given.split("=", 1), metavar="NAME=PYTHON",
        help="faster-whisper, whisper.cpp or openvino, and an interpreter that has it",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "speech", help="files of peers")
    parser.add_argument("--wav", type=Path, help="16 kHz, mono, 16 bits, at most 30 s")
    parser.add_argument("--forms", nargs="+", default=["float32", "int8"])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "speech.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, args.wav or spoken(Path(folder)))
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "load": os.getloadavg()[0]}
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    found[args.model.name] = {**facts, "rows": rows}
    args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

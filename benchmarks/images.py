"""Measures the time from a picture to the first token beside peers, and to that of a second question about it.

python -m benchmarks.images --peer NAME=PYTHON ... [--work FOLDER] [--out benchmarks/results/images.json]

Models have random weights: SigLIP-base with a small Gemma 3, and the encoder of Qwen2.5-VL 3B with four of its text
layers. Peers are llama.cpp (llama-cpp-python with mtmd) and openvino (openvino-genai, and optimum-intel to convert);
PYTHON is the interpreter of an environment with them. Their files are written first, into --work: 16 bits are bfloat16
here, F16 of llama.cpp (encoder and text) and fp16 of OpenVINO; 8 bits are int8, Q8_0 and int8. All answer in turn, so
that a busy machine slows them alike; a figure is the best of the rounds. Pictures are noise, each is new.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.lines import Peer
from quintet import LLM, SamplingParams
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads
from tests.helpers.media import mmproj, wrappers

RESULTS = Path(__file__).parent / "results"
KINDS = {"siglip-base": "gemma3", "qwen2.5-vl-3b": "qwen2.5vl_merger"}
SIDES = {"siglip-base": 512, "qwen2.5-vl-3b": 448}  # pixels
PLACES = {"siglip-base": "<start_of_image>", "qwen2.5-vl-3b": "<|vision_start|><|image_pad|><|vision_end|>"}
QWEN_PIXELS = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
               "size": {"shortest_edge": 3136, "longest_edge": 12845056}}  # fmt: skip
WRAPPERS = {
    "siglip-base": lambda small: replace(
        small,
        text={**small.text, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
              "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "num_attention_heads": 4,
              "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
              "max_position_embeddings": 8192},
        vision={**small.vision, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
        image_processor={"size": {"height": 512, "width": 512}}, processor={"image_seq_length": 64},
        entries={"mm_tokens_per_image": 64},
    ),
    "qwen2.5-vl-3b": lambda small: replace(
        small,
        text={**small.text, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 4,
              "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        vision={**small.vision, "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
                "out_hidden_size": 2048, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                "patch_size": 14},
        image_processor=QWEN_PIXELS, video_processor=QWEN_PIXELS,
    ),
}  # fmt: skip
METADATA = {"siglip-base": {"projector.scale_factor": 4}, "qwen2.5-vl-3b": {"n_wa_pattern": 8}}
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Reader(Peer):
    """A peer that reads pictures."""

    script = "image_worker.py"


def write(name: str, work: Path) -> Path:
    """Returns the folder of a checkpoint in bfloat16, with llama.cpp's files beside it, written if it is not there."""
    folder = work / name
    if not folder.exists():
        made = work / f"{name}-being-made"
        made.mkdir(parents=True)
        kind = KINDS[name]
        wrappers.WRAPPERS[kind] = WRAPPERS[name](mmproj.MODELS[kind])
        found = wrappers.make(kind, made, dtype="bfloat16")
        mmproj.write_text(found, work / f"{name}-F32.gguf")
        for form, dtype in (("16", "float16"), ("8", "Q8_0")):
            mmproj.write_mmproj(found, work / f"{name}-mmproj-{form}.gguf", kind, dtype, **METADATA[name])
        found.model.to(torch.bfloat16).save_pretrained(made)
        made.rename(folder)
    return folder


def start_of(peer: str, python: str, name: str, form: str, work: Path) -> dict[str, Any]:
    """Returns a peer's first order; its files are written if they are not there."""
    order = {"form": form, "threads": threads(), "side": SIDES[name], "text": "what"}
    if peer == "llama.cpp":
        return {**order, "model": str(work / f"{name}-F32.gguf"), "mmproj": str(work / f"{name}-mmproj-{form}.gguf")}
    target, bits = work / f"{name}-openvino-{form}", {"16": "fp16", "8": "int8"}[form]
    if not target.exists():
        command = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "-m", str(work / name)]
        task = ["--task", "image-text-to-text", "--weight-format", bits, str(target)]
        subprocess.run(command + task, check=True, stdout=subprocess.DEVNULL)
        shutil.copy(work / name / "preprocessor_config.json", target)  # its pipeline reads this form
    return {**order, "model": str(target)}


def ask(llm: LLM, name: str, seed: int) -> tuple[float, float]:
    """Returns the seconds to the first token of a new picture, and of a second question about it."""
    side, seconds = SIDES[name], []
    picture = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    for question in ("what", "and why is it so"):
        prompt: Any = {"prompt": PLACES[name] + question, "multi_modal_data": {"image": picture}}
        begun = time.perf_counter()
        llm.generate(prompt, FIRST, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
    return seconds[0], seconds[1]


def measure(name: str, form: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns a row of figures."""
    quantization: dict[str, Any] = {"quantization": "int8"} if form == "8" else {}
    folder = write(name, args.work)
    peers = [Reader(peer, python, start_of(peer, python, name, form, args.work)) for peer, python in args.peer]
    llm = LLM(
        str(folder), device="cpu", max_model_len=2048, kv_cache_memory_bytes="256M", use_tqdm=False, **quantization
    )
    taken: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):  # the first warms up
        own, second = ask(llm, name, number)
        row = {"quintet": own, "second question": second}
        row |= {peer.name: peer.ask({"seed": number})["seconds"] for peer in peers}
        for each, seconds in row.items() if number else ():
            taken.setdefault(each, []).append(seconds)
    for peer in peers:
        peer.close()
    best = {each: round(min(seconds), 3) for each, seconds in taken.items()}
    ratios = [min(taken[peer.name][at] for peer in peers) / taken["quintet"][at] for at in range(args.rounds) if peers]
    return {
        "model": name, "bits": int(form), "seconds": best,
        "ratio": round(min(best[peer.name] for peer in peers) / best["quintet"], 2) if peers else None,
        "least_most": [round(min(ratios), 2), round(max(ratios), 2)] if ratios else None,
        "second_question": round(best["quintet"] / best["second question"], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", default=[], action="append", type=lambda given: given.split("=", 1), metavar="NAME=PYTHON",
        help="llama.cpp or openvino, and an interpreter that has it",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "images", help="files of models")
    parser.add_argument("--models", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--bits", nargs="+", default=["16", "8"], choices=("16", "8"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "images.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name in args.models:
        for form in args.bits:
            rows.append(measure(name, form, args))
            print(rows[-1], flush=True)
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "load": os.getloadavg()[0]}
    kept = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    new = {(row["model"], row["bits"]) for row in rows}
    rows = [row for row in kept if (row["model"], row["bits"]) not in new] + rows
    args.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

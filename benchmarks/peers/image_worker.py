"""One peer of benchmarks/images.py in a process: a JSON line for each order, and one for each answer.

python image_worker.py ENGINE     (llama.cpp or openvino)

Runs with the interpreter of an environment that has the peer, and imports nothing of quintet. An order is a seed, of
which a picture of noise is made; the answer has the seconds from the picture to the first token.
"""

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FirstToken = Callable[[Any], None]


def llama_cpp(start: dict[str, Any]) -> FirstToken:
    """Loads a model and its encoder (mtmd), by llama-cpp-python."""
    library, mtmd = importlib.import_module("llama_cpp"), importlib.import_module("llama_cpp.mtmd_cpp")
    library.llama_backend_init()
    file = _narrowed(library, Path(start["model"]), start["form"], start["threads"])
    given = library.llama_model_default_params()
    given.n_gpu_layers = 0
    model = library.llama_model_load_from_file(str(file).encode(), given)
    settings = library.llama_context_default_params()
    settings.n_ctx = settings.n_batch = 2048
    settings.n_threads = settings.n_threads_batch = start["threads"]
    context = library.llama_init_from_model(model, settings)
    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads = False, start["threads"]
    encoder = mtmd.mtmd_init_from_file(start["mmproj"].encode(), model, options)
    words = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    text = mtmd.mtmd_default_marker() + start["text"].encode()

    def first_token(picture: Any) -> None:
        height, width = picture.shape[:2]
        bitmap = mtmd.mtmd_bitmap_init(width, height, picture.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte)))
        prompt = mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=True, parse_special=True)
        chunks = mtmd.mtmd_input_chunks_init()
        pictures = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if mtmd.mtmd_tokenize(encoder, chunks, ctypes.byref(prompt), pictures, 1):
            raise RuntimeError("llama.cpp does not take the prompt")
        library.llama_memory_clear(library.llama_get_memory(context), True)
        place = library.llama_pos(0)
        if mtmd.mtmd_helper_eval_chunks(encoder, context, chunks, 0, 0, 2048, True, ctypes.byref(place)):
            raise RuntimeError("llama.cpp does not compute the prompt")
        np.ctypeslib.as_array(library.llama_get_logits_ith(context, -1), (words,)).argmax()
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)

    return first_token


def _narrowed(library: Any, file: Path, form: str, threads: int) -> Path:
    """Returns the text model's file in 16 or 8 bits, made of float32's."""
    target = file.with_name(file.name.replace("F32", {"16": "F16", "8": "Q8_0"}[form]))
    if not target.exists():
        wanted = library.llama_model_quantize_default_params()
        wanted.ftype = {"16": library.LLAMA_FTYPE_MOSTLY_F16, "8": library.LLAMA_FTYPE_MOSTLY_Q8_0}[form]
        wanted.nthread = threads
        if library.llama_model_quantize(str(file).encode(), str(target).encode(), ctypes.byref(wanted)):
            raise RuntimeError(f"llama.cpp does not quantize {file}")
    return target


def openvino(start: dict[str, Any]) -> FirstToken:
    """Makes a pipeline of OpenVINO GenAI."""
    genai, tensors = importlib.import_module("openvino_genai"), importlib.import_module("openvino")
    pipeline = genai.VLMPipeline(start["model"], "CPU", INFERENCE_NUM_THREADS=start["threads"])

    def first_token(picture: Any) -> None:
        images = [tensors.Tensor(np.ascontiguousarray(picture)[None])]
        pipeline.generate(start["text"], images=images, max_new_tokens=1, do_sample=False, apply_chat_template=False)

    return first_token


ENGINES = {"llama.cpp": llama_cpp, "openvino": openvino}


def main() -> None:
    """Loads the model of the first order, and answers the others."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the error stream
    start = json.loads(sys.stdin.readline())
    first_token = ENGINES[sys.argv[1]](start)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        side = start["side"]
        picture = np.random.default_rng(json.loads(line)["seed"]).integers(0, 256, (side, side, 3), dtype=np.uint8)
        begun = time.perf_counter()
        first_token(picture)
        print(json.dumps({"seconds": time.perf_counter() - begun}), file=answers, flush=True)


if __name__ == "__main__":
    main()

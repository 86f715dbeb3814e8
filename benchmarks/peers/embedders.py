"""One embedding engine in one process: loads a model once, then times texts on demand, a JSON object a line.

python -m benchmarks.peers.embedders '{"engine": "quintet", ...}'               (the fields of protocol.Job)

It says {"ready": {}} or {"error": why}. To {"texts": [[ids]], "seconds": s} it answers how long each of the calls took
that fit into s seconds, and the first vector. What engines print goes to the error stream. Each peer's functions import
what they need: an environment holds one peer. What is converted lies beside the checkpoint.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.protocol import Job
from benchmarks.peers.worker import private_output, say

Vectors = np.ndarray[Any, np.dtype[np.float32]]
Embed = Callable[[Sequence[Sequence[int]]], Vectors]  # texts of one length -> a vector each, of length 1
MOST = 512  # tokens of a text
WARM = 3  # calls after which engines have their memory and, of few tokens, their recorded steps


def quintet(job: Job) -> Embed:
    from quintet import LLM

    dtype, _, scheme = job.variant.partition(":")
    llm = LLM(job.checkpoint, device="cpu", dtype=dtype, quantization=scheme or None, max_model_len=MOST,
              skip_tokenizer_init=True, use_tqdm=False, pooler_config={"pooling_type": "MEAN"})  # fmt: skip

    def embed(texts: Sequence[Sequence[int]]) -> Vectors:
        return np.stack([each.outputs.data for each in llm.embed([list(ids) for ids in texts], use_tqdm=False)])

    return embed


def _module(job: Job, dtype: Any = None) -> Any:
    """The checkpoint as Sentence Transformers runs it: the trunk, the mean, length 1."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    trunk = Transformer(job.checkpoint, model_kwargs={"dtype": dtype or torch.float32})
    return SentenceTransformer(
        modules=[trunk, Pooling(trunk.get_word_embedding_dimension()), Normalize()], device="cpu"
    )


def sentence_transformers(job: Job) -> Embed:
    import torch

    torch.set_num_threads(job.threads)
    model = _module(job, getattr(torch, job.variant)).eval()

    def embed(texts: Sequence[Sequence[int]]) -> Vectors:
        ids = torch.tensor(texts)
        with torch.inference_mode():
            given = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        found: Vectors = given["sentence_embedding"].float().numpy()
        return found

    return embed


def _onnx(job: Job) -> Path:
    """Exports the trunk, the mean and the norm as one ONNX graph, with any number of texts and tokens."""
    import torch

    path = job.converted(".onnx").with_name(f"{Path(job.checkpoint).name}.onnx")
    if not path.exists():
        trunk = _module(job)[0].auto_model.eval()

        class Whole(torch.nn.Module):
            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                states = trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
                mask = attention_mask[..., None].to(states.dtype)
                return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

        given = tuple(torch.ones(2, 16, dtype=torch.int64) for _ in range(2))  # two tensors: two inputs
        sizes = {0: torch.export.Dim("texts", min=1, max=4096), 1: torch.export.Dim("tokens", min=2, max=MOST)}
        names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["vectors"]}
        torch.onnx.export(Whole(), given, str(path), dynamic_shapes=(sizes, sizes), external_data=False, **names)
    return path


def onnxruntime(job: Job) -> Embed:
    import onnxruntime as ort
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.transformers import optimizer

    path = _onnx(job)
    fused = path.with_suffix(".fused.onnx")
    if not fused.exists():  # as the files are that fastembed fetches
        optimizer.optimize_model(str(path), model_type="bert").save_model_to_file(str(fused))
    if job.variant == "int8":
        small = path.with_suffix(".int8.onnx")
        if not small.exists():
            quantize_dynamic(str(fused), str(small))
        fused = small
    options = ort.SessionOptions()
    options.intra_op_num_threads = job.threads
    session = ort.InferenceSession(str(fused), options, providers=["CPUExecutionProvider"])
    return _fed(lambda given: session.run(None, given)[0])


def openvino(job: Job) -> Embed:
    import openvino as ov

    path, core = _onnx(job), ov.Core()
    if job.variant == "int8":
        path = _rounded(path, core)
    precision = "f32" if job.variant == "float32" else "bf16"
    settings = {
        "INFERENCE_NUM_THREADS": job.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }
    request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
    return _fed(lambda given: np.array(request.infer(given)[0], np.float32))


def _rounded(path: Path, core: Any) -> Path:
    """Weights and activations of 8 bits, by NNCF's own recipe for transformers."""
    import nncf
    import openvino as ov

    target = path.with_suffix(".int8.xml")
    if not target.exists():
        draw = np.random.default_rng(1)
        some = [_inputs(draw.integers(1000, 20000, (1, 128))) for _ in range(50)]
        model = nncf.quantize(core.read_model(path), nncf.Dataset(some), model_type=nncf.ModelType.TRANSFORMER)
        ov.save_model(model, target, compress_to_fp16=False)
    return target


def _inputs(texts: Any) -> dict[str, Any]:
    ids = np.array(texts, np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _fed(run: Callable[[dict[str, Any]], Vectors]) -> Embed:
    return lambda texts: run(_inputs(texts))


def llama_cpp(job: Job) -> Embed:
    """Through its C calls, all texts of one call in one batch, as its own embedding program has it."""
    import llama_cpp as lib

    from benchmarks.peers import gguf_bert

    path = job.converted(".gguf")
    if not path.exists():
        gguf_bert.write(Path(job.checkpoint), path, job.variant)
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    if not model:
        raise ValueError(f"llama.cpp cannot load {path}")
    contexts: dict[tuple[int, int], Any] = {}

    def embed(texts: Sequence[Sequence[int]]) -> Vectors:
        each = max(1, min(len(texts), 8192 // len(texts[0])))  # texts of a batch
        size = each, len(texts[0])
        if size not in contexts:
            contexts[size] = _context(lib, model, job, *size)
        context, batch = contexts[size]
        width = lib.llama_model_n_embd(model)
        found = []
        for first in range(0, len(texts), each):
            part = texts[first : first + each]
            _fill(batch, part)
            if lib.llama_encode(context, batch):
                raise RuntimeError("llama_encode failed")
            for sequence in range(len(part)):
                found.append(np.ctypeslib.as_array(lib.llama_get_embeddings_seq(context, sequence), (width,)).copy())
        vectors = np.stack(found)
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    embed.quiet = quiet  # type: ignore[attr-defined]  # the library calls it as long as it runs
    return embed


def _context(lib: Any, model: Any, job: Job, each: int, tokens: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(each * tokens, 32)
    params.n_seq_max = each
    params.n_threads = params.n_threads_batch = job.threads
    params.embeddings, params.pooling_type = True, lib.LLAMA_POOLING_TYPE_MEAN
    return lib.llama_init_from_model(model, params), lib.llama_batch_init(each * tokens, 0, 1)


def _fill(batch: Any, texts: Sequence[Sequence[int]]) -> None:
    at = 0
    for sequence, ids in enumerate(texts):
        for position, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, True
            at += 1
    batch.n_tokens = at


ENGINES: dict[str, Callable[[Job], Embed]] = {
    "quintet": quintet,
    "sentence-transformers": sentence_transformers,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "llama.cpp": llama_cpp,
}


def timed(embed: Embed, texts: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
    """Some calls unseen, then as many as fit, three at least; each with other texts."""
    vector = embed(texts)[0].tolist()
    for turn in range(1, WARM):
        embed(_turned(texts, turn))
    took: list[float] = []
    while len(took) < 3 or sum(took) < seconds:
        other = _turned(texts, WARM + len(took))
        begun = time.perf_counter()
        embed(other)
        took.append(time.perf_counter() - begun)
    return {"took": took, "vector": vector}


def _turned(texts: Sequence[Sequence[int]], by: int) -> list[list[int]]:
    """Returns texts of the same lengths, with tokens not sent before."""
    return [[1000 + (token + 7919 * by) % 19000 for token in ids] for ids in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=json.loads)
    parser.add_argument(
        "--convert", action="store_true", help="accepted, and nothing: files are made when they are loaded"
    )
    args = parser.parse_args()
    job, answers = Job(**args.job), private_output()
    try:
        embed = ENGINES[job.engine](job)
    except Exception as error:
        say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    say(answers, {"ready": {}})
    for line in sys.stdin:
        say(answers, timed(embed, **json.loads(line)))


if __name__ == "__main__":
    main()

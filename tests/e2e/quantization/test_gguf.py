"""GGUF files that llama.cpp's converter wrote, against transformers' models of them and llama.cpp's own logits.

The matrices of the models lose nothing in the files (tests/data/quantized/README.md): transformers' logits are exact.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quintet import LLM, SamplingParams
from quintet.config import EngineConfig
from quintet.engine.startup import prepare
from quintet.gguf.cursor import Array
from quintet.gguf.file import read
from quintet.gguf.tensor_types import KINDS
from quintet.hub.model_impl import read_model
from quintet.hub.resolve import load_model_config
from quintet.interface.platform import Capabilities
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.model_loader.gguf_tensors import GGUFEntry
from quintet.model_loader.gguf_weights import entries
from quintet.model_loader.loader import declared_weights
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import Tiny
from tests.helpers.checkpoints.gguf import Row, header, joined, requantized
from tests.helpers.platforms.run_model import Runner

FOLDER = Path(__file__).parents[2] / "data" / "quantized" / "gguf"
ENCODERS = (
    *("bert", "jina-bert-v2", "jina-bert-v2-normed", "jina-bert-v3", "modern-bert", "nomic-bert", "roberta"),
    *("xlm-roberta", "xlm-roberta-reranker", "qwen3-reranker"),
    *("nomic-bert-moe", "eurobert", "gemma-embedding", "llama-embed", "qwen3-embedding"),
)
NAMES = sorted({path.stem for path in FOLDER.glob("*.gguf")} - set(ENCODERS))
LOGITS = load_file(FOLDER / "logits.safetensors")
IDS = LOGITS["ids"].tolist()


# products with minima, whose scales have 16 bits on this platform; experts with clamped gates; many products of Q8_0,
# one behind the other; of the others 2e-3
OFF = {"llama-q2_k": 3e-2, "gpt-oss": 4e-3, "gemma4-e2b": 4e-3}


def runner(path: Path, keeps: bool = True, model_impl: str = "auto") -> Runner:
    """With matrices as the platform keeps them, or dequantized."""
    facts, (config, backend) = PLATFORM.probe(), read_model(EngineConfig(str(path), model_impl=model_impl), path, {})
    assert isinstance(facts, Capabilities)
    said = getattr(config, "quantization_config", None)
    forms = QuantizationPlan(
        checkpoint=read_quantization_config(said), supported_kinds=facts.weight_formats if keeps else frozenset()
    )
    sizes = {"quantization": forms, "max_model_len": 64, "transformers_backend": bool(backend)}
    return Runner(Tiny(path, config, None), **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_and_llama_cpp(name: str) -> None:
    """Products are of activations in 16 bits here: 2^-15 of a group's largest; in llama.cpp of 8 bits."""
    (got,) = runner(FOLDER / f"{name}.gguf").prompts([IDS])
    for source, off in (("transformers", OFF.get(name, 2e-3)), ("llama.cpp", 0.25)):
        if (want := LOGITS.get(f"{name}.{source}")) is None:
            assert source == "llama.cpp"
            continue
        assert float(want.std()) > 0.1
        torch.testing.assert_close(got, want, rtol=0, atol=off * float(want.std()))


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_logits_are_exact(name: str) -> None:
    (got,) = runner(FOLDER / f"{name}.gguf", keeps=False).prompts([IDS])
    want = LOGITS[f"{name}.transformers"]
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4 * float(want.std()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "smollm3", "mixtral", "qwen3moe", "olmoe"])
def test_what_a_file_has_joined_is_read_by_rows(name: str, tmp_path: Path) -> None:
    """As by llama.cpp's --fuse-qkv and --fuse-gate-up-exps: the same numbers, so the same bits."""
    path = joined(FOLDER / f"{name}.gguf", tmp_path / f"{name}.gguf")
    left = [each for each in read(path).tensors if re.search(r"attn_[qkv]\.|ffn_(gate|up)_exps", each)]
    assert not left and any(".attn_qkv." in each for each in read(path).tensors)
    ((got,), (want,)) = (runner(each).prompts([IDS]) for each in (path, FOLDER / f"{name}.gguf"))
    assert torch.equal(got, want)


def test_joined_rows_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    path = joined(FOLDER / "llama.gguf", tmp_path / "made.gguf", {"attn_qkv": ("attn_q", "attn_k")})
    with pytest.raises(
        ValueError, match=r"blk\.0\.attn_qkv\.weight has \d+ rows, not \d+ \+ \d+ \+ \d+; fetch it again"
    ):
        runner(path)


def test_a_file_is_served_by_its_path() -> None:
    llm = LLM(FOLDER / "llama.gguf", skip_tokenizer_init=True, num_pages=32, dtype="float32")
    params = SamplingParams(max_tokens=5, temperature=0.0, detokenize=False, ignore_eos=True)
    alone = [llm.generate({"prompt_token_ids": IDS[:n]}, params)[0].outputs[0].token_ids for n in (12, 5, 9)]
    batch = llm.generate([{"prompt_token_ids": IDS[:n]} for n in (12, 5, 9)], params)
    assert [each.outputs[0].token_ids for each in batch] == alone
    assert alone[0][0] == int(LOGITS["llama.transformers"][-1].argmax())


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_files_without_a_family_here_run_by_the_code_of_transformers(kind: str, tmp_path: Path) -> None:
    """Greedy tokens in float32 are those of the checkpoint that the file's tensors make in transformers' names."""
    file = FOLDER / "bitnet.gguf"
    file = file if kind == "F16" else requantized(file, tmp_path / "made.gguf", kind)
    config, why = read_model(EngineConfig(model=str(file)), file, {})
    assert why == "model_impl transformers: quintet has no file for model type 'bitnet', and transformers' own " \
        "code runs"  # fmt: skip
    types = vars(config).pop("quantization_config", {}).get("types", {})
    assert set(types.values()) == ({kind} - {"F16"})  # matrices in floats are no quantization
    config.save_pretrained(tmp_path)
    tensors = {
        name: entry.floats().float() if isinstance(entry, GGUFEntry) else entry.tensor().float()
        for name, entry in entries(file)
    }
    save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors")
    bits = 16 if types else None
    llm = LLM(file, skip_tokenizer_init=True, num_pages=32, dtype="float32", activation_bits=bits)
    params = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": IDS[:n]} for n in (12, 1, 9)], params)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        want = theirs.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert output.outputs[0].token_ids == want.tolist()


def test_tables_of_layers_stay_quantized_in_the_code_of_transformers() -> None:
    model = runner(FOLDER / "gemma4-e2b.gguf", model_impl="transformers").worker.model
    tables = [model.get_submodule(f"model.{name}") for name in ("embed_tokens", "embed_tokens_per_layer")]
    assert [(type(each).__name__, each.format.block_type) for each in tables] == [
        ("HFEmbedding", "Q8_0"),
        ("HFTable", "Q8_0"),
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3", "gemma4-e2b", "gemma4-moe"])
def test_model_impl_transformers_reads_files_too(name: str) -> None:
    """Each tensor by the name that transformers' own checkpoints have for it."""
    run = runner(FOLDER / f"{name}.gguf", keeps=False, model_impl="transformers")
    want = LOGITS[f"{name}.transformers"]
    torch.testing.assert_close(run.prompts([IDS])[0], want, rtol=0, atol=2e-4 * float(want.std()))


def test_alone_is_batched_bit_for_bit() -> None:
    for name in ("llama", "qwen3moe", "llama-f16"):
        run = runner(FOLDER / f"{name}.gguf")
        prompts = [IDS, IDS[:5], IDS[3:10]]
        for prompt, got in zip(prompts, run.prompts(prompts), strict=True):
            assert torch.equal(got, run.prompts([prompt])[0])


def test_schemes_for_floats_are_refused_on_a_quantized_file() -> None:
    with pytest.raises(ValueError, match=r"quantized by gguf \(16 Q8_0\)"):
        LLM(FOLDER / "llama.gguf", skip_tokenizer_init=True, quantization="int8")


def with_tensors(source: str, to: Path, replaced: dict[str, tuple[str, bytes]]) -> Path:
    """A fixture with other blocks in some tensors: name -> type, and the bytes."""
    whole = read(FOLDER / f"{source}.gguf")
    raw, numbers = whole.path.read_bytes(), {kind.name: number for number, kind in KINDS.items()}
    rows, data = [], b""
    for name, each in whole.tensors.items():
        kind, blocks = replaced.get(name, (each.kind.name, raw[each.start : each.start + each.size]))
        rows.append(Row(name, each.shape[::-1], numbers[kind], len(data)))
        data += blocks + bytes(-len(blocks) % 32)
    to.write_bytes(header(whole.metadata, rows) + data)
    return to


@pytest.mark.parametrize("kind", ["MXFP4", "Q4_0"])
def test_interleaved_experts_keep_their_blocks(kind: str, tmp_path: Path) -> None:
    """gpt-oss as published has MXFP4; gate and up are apart in the file, and their rows take turns in the model."""
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import dequantize, quantize

    whole = read(FOLDER / "gpt-oss.gguf")
    raw, generator = whole.path.read_bytes(), np.random.default_rng(0)
    blocks, floats = {}, {}
    for name, each in whole.tensors.items():
        if "_exps.weight" in name:
            packed = quantize(generator.normal(size=each.shape).astype(np.float32) * 0.3, Kind[kind])
            blocks[name] = kind, packed.tobytes()
            floats[name] = "F32", dequantize(packed, Kind[kind]).astype(np.float32).tobytes()
    assert len(blocks) == 6 and len(raw) > 10000
    held, plain = (
        with_tensors("gpt-oss", tmp_path / f"{name}.gguf", each) for name, each in (("b", blocks), ("f", floats))
    )
    said = load_model_config(held).quantization_config["types"]
    assert said["model.layers.0.mlp.experts.gate_up_proj"] == kind
    (want,) = runner(plain, keeps=False).prompts([IDS])
    for keeps, off in ((False, 2e-5), (True, 1e-2)):
        (got,) = runner(held, keeps).prompts([IDS])
        torch.testing.assert_close(got, want, rtol=0, atol=off * float(want.std()))


def grid_blocks(kind: str, count: int, generator: np.random.Generator) -> Any:
    """Blocks of any content [N, bytes], with scales of an ordinary size."""
    size = next(each.type_size for each in KINDS.values() if each.name == kind)
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    scale = np.array([2.0 ** (-9 if kind == "IQ3_S" else -6 if "IQ1" in kind else -10)], np.float16).view(np.uint8)
    if kind != "IQ1_M":
        blocks[:, :2] = scale
        return blocks
    for place, half in enumerate((scale[0] & 15, scale[0] >> 4, scale[1] & 15, scale[1] >> 4)):
        blocks[:, 49 + 2 * place] = blocks[:, 49 + 2 * place] & 15 | half << 4
    return blocks


@pytest.mark.parametrize("kind", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_grids_are_held_in_four_bits(kind: str, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import dequantize

    whole, generator = read(FOLDER / "llama-q2_k.gguf"), np.random.default_rng(0)
    blocks, floats = {}, {}
    for name, each in whole.tensors.items():
        if "blk." in name and len(each.shape) == 2 and each.shape[1] % 256 == 0:
            made = grid_blocks(kind, each.shape[0] * each.shape[1] // 256, generator)
            blocks[name] = kind, made.tobytes()
            floats[name] = "F32", dequantize(made, Kind[kind]).astype(np.float32).tobytes()
    held, plain = (
        with_tensors("llama-q2_k", tmp_path / f"{name}.gguf", each) for name, each in (("b", blocks), ("f", floats))
    )
    (want,) = runner(plain, keeps=False).prompts([IDS])
    for keeps, off in ((False, 2e-5), (True, 2e-2)):
        run = runner(held, keeps)
        formats = {each.weight.format.kind for each in declared_weights(run.worker.model) if "mlp" in each.path}
        assert formats == {"table4" if keeps else "plain"}
        torch.testing.assert_close(run.prompts([IDS])[0], want, rtol=0, atol=off * float(want.std()))


@pytest.mark.parametrize("others", [("Q8_0", "Q8_0"), ("Q4_0", "Q8_0")])
def test_parts_of_one_matrix_may_be_of_several_types(others: tuple[str, str], tmp_path: Path) -> None:
    """As in Q4_K_M, where values have more bits than queries: InternLM has all in one matrix, which becomes floats."""
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import dequantize, quantize

    whole = read(FOLDER / "internlm2.gguf")
    raw, blocks, floats = whole.path.read_bytes(), {}, {}
    for name, kind in (("blk.0.attn_q.weight", others[0]), ("blk.0.attn_v.weight", others[1])):
        each = whole.tensors[name]
        stored = np.frombuffer(raw[each.start : each.start + each.size], np.uint8).reshape(each.shape[0], -1)
        packed = quantize(dequantize(stored, Kind.Q8_0), Kind[kind])
        blocks[name] = kind, packed.tobytes()
        floats[name] = "F32", dequantize(packed, Kind[kind]).astype(np.float32).tobytes()
    held, plain = (
        with_tensors("internlm2", tmp_path / f"{name}.gguf", each) for name, each in (("b", blocks), ("f", floats))
    )
    types = load_model_config(held).quantization_config["types"]
    assert ("model.layers.0.self_attn.wqkv" in types) == (len({*others, "Q8_0"}) == 1)
    ((got,), (want,)) = (runner(each, keeps=False).prompts([IDS]) for each in (held, plain))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.std()))


def test_first_files_of_qwen3_next_have_delta_nets_in_one_matrix(tmp_path: Path) -> None:
    """Of each key head: its query, key, values and gates."""
    whole = read(FOLDER / "qwen3next.gguf")
    raw, numbers = whole.path.read_bytes(), {kind.name: number for number, kind in KINDS.items()}
    keys, size, inner = (
        whole.metadata[f"qwen3next.ssm.{name}"] for name in ("group_count", "state_size", "inner_size")
    )
    rows, data = [], b""
    for name, each in whole.tensors.items():
        blocks, shape = raw[each.start : each.start + each.size], each.shape
        if name == "blk.0.attn_gate.weight":
            continue
        if name == "blk.0.attn_qkv.weight":
            gate = whole.tensors["blk.0.attn_gate.weight"]
            blocks += raw[gate.start : gate.start + gate.size]
            parts = np.split(
                np.frombuffer(blocks, np.float16).reshape(-1, shape[1]), np.cumsum([keys * size] * 2 + [inner])
            )
            joined = np.concatenate([part.reshape(keys, -1, shape[1]) for part in parts], 1)
            name, blocks, shape = "blk.0.ssm_in.weight", joined.tobytes(), (shape[0] + gate.shape[0], shape[1])
        rows.append(Row(name, shape[::-1], numbers[each.kind.name], len(data)))
        data += blocks + bytes(-len(blocks) % 32)
    metadata = {key: list(each) if isinstance(each, Array) else each for key, each in whole.metadata.items()}
    (tmp_path / "first.gguf").write_bytes(header(metadata, rows) + data)
    ((got,), (want,)) = (runner(each).prompts([IDS]) for each in (tmp_path / "first.gguf", whole.path))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.std()))


def test_a_split_model_is_one(tmp_path: Path) -> None:
    """In two files, by the reader's own account of what the whole one holds."""
    whole = read(FOLDER / "llama.gguf")
    names, raw = list(whole.tensors), whole.path.read_bytes()
    numbers = {kind.name: number for number, kind in KINDS.items()}
    for index, part in enumerate((names[:9], names[9:])):
        rows, data = [], b""
        for name in part:
            each = whole.tensors[name]
            rows.append(Row(name, each.shape[::-1], numbers[each.kind.name], len(data)))
            data += raw[each.start : each.start + each.size]
            data += bytes(-len(data) % 32)
        said = {"split.no": index, "split.count": 2, **(whole.metadata if index == 0 else {})}
        (tmp_path / f"llama-0000{index + 1}-of-00002.gguf").write_bytes(header(said, rows) + data)
    (got,) = runner(tmp_path / "llama-00001-of-00002.gguf").prompts([IDS])
    assert torch.equal(got, runner(FOLDER / "llama.gguf").prompts([IDS])[0])


def test_activations_have_eight_bits_as_in_llama_cpp_unless_asked_otherwise() -> None:
    def logprob(**settings: Any) -> float:
        llm = LLM(FOLDER / "llama.gguf", skip_tokenizer_init=True, num_pages=32, dtype="float32", **settings)
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=1)
        (output,) = llm.generate({"prompt_token_ids": IDS}, params)
        found = output.outputs[0].logprobs
        assert found
        return next(iter(found[0].values())).logprob

    exact, rounded = logprob(activation_bits=16), logprob()
    assert rounded == logprob(activation_bits=8) != exact
    assert abs(exact - float(LOGITS["llama.transformers"][-1].log_softmax(-1).max())) < 1e-3
    said = "\n".join(prepare(EngineConfig(FOLDER / "llama.gguf", device="cpu")).reasons)
    assert "activations in 8 bits, as llama.cpp has them" in said and "w8a8 by native" in said

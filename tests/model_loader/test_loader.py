"""Reading checkpoints: what is wrong with one is an error that names the tensor; what is right is not copied."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quintet.conformance.harness.linear_layers import CanonicalReader
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.interface.platform import SingleRank
from quintet.interface.weights import StoredTensor, WeightFormat
from quintet.layers.build import BuildContext, Layer, finalize, replicated
from quintet.layers.linear import CheckpointLayout, column_parallel
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.checkpoint_config import CheckpointQuantization, UniformPlan
from quintet.model_loader.loader import RandomWeights, declared_weights
from quintet.ops import bind
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, Tiny, make, variant

Change = Callable[[dict[str, Tensor]], Any]


def loaded(tiny: Tiny, folder: Path | None, dtype: torch.dtype = torch.float32) -> Any:
    worker = Worker(PLATFORM(), tiny.config, ModelSizes(dtype, 16, 64))
    worker.load(folder, 4, (), progress=False)
    return worker.model


def changed(tiny: Tiny, folder: Path, change: Change) -> Path:
    tensors = load_file(tiny.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"lacks {NORM}"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.2" in name], r"lacks (\S+, ){7}\S+ and 1 more"),
        (lambda t: t.update({"model.layers.0.extra.weight": torch.ones(3)}), r"holds model\.layers\.0\.extra\.weight"),
        (lambda t: t.update({NORM: torch.ones(5)}), rf"{NORM} is \[5\], not \[48\]"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(48, 24)}),
            r"k_proj\.weight is \[48, 24\], not \[24, 48\]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(7, 48)}), r"lm_head\.weight is \[7, 48\], not \[101, 48\]"),
    ],
)
def test_wrong_tensors_are_named(change: Change, message: str, tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    with pytest.raises(ValueError, match=message):
        loaded(tiny, changed(tiny, tmp_path, change))


def test_wrong_shape_of_a_fused_or_transposed_tensor_is_told_as_stored(tmp_path: Path) -> None:
    for family, name, message in [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", r"qkv_proj\.weight is \[9, 48\], not \[96, 48\]"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", r"c_attn\.weight is \[9, 48\], not \[48, 144\]"),
    ]:
        tiny = variant(family, "plain")
        with pytest.raises(ValueError, match=message):
            loaded(tiny, changed(tiny, tmp_path, lambda t, name=name: t.update({name: torch.ones(9, 48)})))


def test_another_models_config_is_refused() -> None:
    biased = make("llama", {**PLAIN, "attention_bias": True})
    with pytest.raises(ValueError, match=r"self_attn\.k_proj\.bias.*config.json asks for"):
        loaded(biased, variant("llama", "plain").folder)
    with pytest.raises(ValueError, match=r"holds model\.layers\.0\.self_attn\.k_proj\.bias"):
        loaded(variant("llama", "plain"), biased.folder)


def test_what_is_not_needed_is_ignored(tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    more = changed(tiny, tmp_path, lambda t: t.update({"model.layers.0.rotary_emb.inv_freq": torch.ones(4)}))
    wanted = dict(loaded(tiny, tiny.folder).named_parameters())
    for name, parameter in loaded(tiny, more).named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def test_truncated_file(tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    whole = (tiny.folder / "model.safetensors").read_bytes()
    for kept in (0, 5, 100, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .* fetch it again"):
            loaded(tiny, tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file; .* load_format='dummy'"):
        loaded(tiny, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="only what torch.save wrote: load_format='pt' reads it"):
        loaded(tiny, tmp_path)


def sharded(tiny: Tiny, folder: Path) -> None:
    tensors = list(load_file(tiny.folder / "model.safetensors").items())
    where = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(dict(tensors[number::3]), folder / file)
        where |= {name: file for name, _ in tensors[number::3]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    sharded(tiny, tmp_path)
    save_file({"layers.0.wq": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    ours, theirs = loaded(tiny, tmp_path), loaded(tiny, tiny.folder)
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00003\.safetensors, which model\.safetensors\.index"):
        loaded(tiny, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="index.json is not JSON"):
        loaded(tiny, tmp_path)


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    for name in ("a", "b"):
        shutil.copy(tiny.folder / "model.safetensors", tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"holds \S+ twice"):
        loaded(tiny, tmp_path)


def mapped(folder: Path) -> list[range]:
    """Where this process sees the folder's files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if str(folder) in line]
    return [range(int(first, 16), int(last, 16)) for first, last in ends]


def stored_as(tiny: Tiny, folder: Path, dtype: torch.dtype) -> Path:
    return changed(tiny, folder, lambda t: t.update({name: x.to(dtype) for name, x in list(t.items())}))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's /proc")
def test_weights_of_the_right_type_stay_in_the_memory_map(tmp_path: Path) -> None:
    """Joined ones (q, k and v) are copies, and so are packed ones; all others are the file's own pages."""
    tiny = variant("llama", "plain")
    model = loaded(tiny, stored_as(tiny, tmp_path, torch.bfloat16), torch.bfloat16)
    places = mapped(tmp_path)
    assert places
    for name, weight in model.named_parameters():
        inside = any(weight.data_ptr() in place for place in places)
        joined = any(part in name for part in ("qkv", "gate_up", "table"))
        assert inside == (not joined and weight.dim() < 3), name


TIED = [
    ("llama", "tied, biased"),
    ("qwen2", "tied"),
    ("gemma2", "plain"),
    ("gpt2", "plain"),
    ("opt", "norm after, narrow"),
]


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "name"), TIED)
def test_a_tied_head_is_held_once(family: str, name: str, dtype: torch.dtype, dummy: bool) -> None:
    """Also where the type is converted, and where the weights are random."""
    tiny = variant(family, name)
    model = loaded(tiny, None if dummy else tiny.folder, dtype)
    (embedding,) = [p for n, p in model.named_parameters() if n.endswith(("embed_tokens.weight", "wte.weight"))]
    head = model.lm_head.linear.weight
    assert head.data_ptr() == embedding.data_ptr()
    assert head.shape == embedding.shape


def test_pieces_of_one_tensor_share_none_of_it() -> None:
    """Outputs in orders of their own: each piece is packed from a part of the fused tensor."""
    fmt, stored = WeightFormat("int4", 4, 16, 32, zeros=True, act_order=True), CheckpointLayout(fused="qkv")
    forms = QuantizationPlan(checkpoint=CheckpointQuantization("a test's", UniformPlan(CanonicalReader(fmt))))
    build = BuildContext(
        bind({}), lambda spec: pytest.fail("nothing attends"), SingleRank(), torch.float32, 16, 64, forms
    )
    outputs = {name: replicated(64, 1) for name in ("q", "k", "v")}
    model = nn.ModuleDict({"fused": column_parallel(build, 64, outputs, stored=stored)})
    finalize(model)
    wanted = [each.weight for each in declared_weights(model)]
    assert [(each.slices[0].source, each.slices[0].offset) for each in wanted] == [
        ("qkv.weight", i) for i in (0, 64, 128)
    ]
    assert not any(each.shared for each in wanted)


def test_a_stored_head_beside_a_tied_config_is_ignored_if_it_is_the_embedding(tmp_path: Path) -> None:
    tiny = variant("llama", "tied, biased")
    tied = changed(tiny, tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = loaded(tiny, tied)
    assert torch.equal(model.lm_head.linear.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_are_finite_and_the_same_every_time(family: str) -> None:
    tiny = variant(family, next(iter(FAMILIES[family])))
    first, second = (dict(loaded(tiny, None, torch.bfloat16).named_parameters()) for _ in range(2))
    read = dict(loaded(tiny, tiny.folder, torch.bfloat16).named_parameters())
    assert {n: p.shape for n, p in first.items()} == {n: p.shape for n, p in read.items()}
    for name, weight in first.items():
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, second[name])


def test_dummy_weights_are_drawn_once_and_differ_by_row_and_by_name() -> None:
    made, of = RandomWeights(), StoredTensor((1500, 1024), (torch.bfloat16,))
    first, second = made.read("a.weight", of), made.read("b.weight", of)
    assert first.dtype == torch.bfloat16 and first.is_contiguous()
    assert abs(float(first.float().std()) - 0.02) < 1e-3 and abs(float(first.float().mean())) < 1e-3
    assert len(torch.unique(first.float(), dim=0)) == 1500 and not torch.equal(first, second)
    assert torch.equal(first, RandomWeights().read("a.weight", of))


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes_are_what_is_held(family: str) -> None:
    tiny = variant(family, next(iter(FAMILIES[family])))
    worker = Worker(PLATFORM(), tiny.config, ModelSizes(torch.bfloat16, 16, 64))
    planned = worker.weight_bytes
    worker.load(tiny.folder, 4, (), progress=False)
    layers = [(path, each) for path, each in worker.model.named_modules() if isinstance(each, Layer)]
    computed = {f"{path}.{name}" for path, each in layers for name in each.constants()}
    named = worker.model.named_parameters()
    held = {p.data_ptr(): p.numel() * p.element_size() for name, p in named if name not in computed}
    assert sum(held.values()) == planned

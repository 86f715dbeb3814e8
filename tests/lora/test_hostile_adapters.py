"""Adapters that are wrong, not supported or made to harm: refused with tensor or entry, reason and remedy."""

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from quintet.lora import tensor_file
from quintet.lora.adapter import AdapterError, LoRABounds, adapter_digest, read_adapter, write_adapter

BOUNDS = LoRABounds(max_rank=16, max_bytes=10_000, max_tensors=20)
PREFIX = "base_model.model.model.layers.0.self_attn."
A, B = f"{PREFIX}q_proj.lora_A.weight", f"{PREFIX}q_proj.lora_B.weight"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def tensors(rank: int = 4) -> dict[str, Tensor]:
    return {A: torch.ones(rank, 6), B: torch.ones(10, rank)}


def folder_of(folder: Path, changes: Mapping[str, Tensor | None] = MappingProxyType({}), **entries: Any) -> Path:
    """An adapter with tensors added, or left out where None is given, and entries changed."""
    held = {name: tensor for name, tensor in {**tensors(), **changes}.items() if tensor is not None}
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **entries}))
    save_file(held, folder / "adapter_model.safetensors")
    return folder


def refusal(folder: Path, bounds: LoRABounds = BOUNDS) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, bounds)
    message = str(caught.value)
    assert message.startswith(str(folder)) and "\n" not in message and len(message) < 1000
    return message


def test_the_adapter_that_the_cases_change_is_read(tmp_path: Path) -> None:
    adapter = read_adapter(folder_of(tmp_path), BOUNDS)
    assert adapter.modules["model.layers.0.self_attn.q_proj"].scaling == 2 and adapter.rank == 4


# ------------------------------------------------------------------------------------------------------------- entries

CONVERSION = "path_initial_model_for_weight_conversion"
ENTRIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another type": ({"peft_type": "IA3"}, ["peft_type", "'IA3'", "merge"]),
    "no type": ({"peft_type": None}, ["peft_type", "None"]),
    "a type of numbers": ({"peft_type": [1]}, ["peft_type"]),
    "repeated layers": ({"layer_replication": [[0, 4]]}, ["layer_replication", "merge"]),
    "activated": ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens"]),
    "token rows": ({"trainable_token_indices": [5]}, ["trainable_token_indices"]),
    "megatron": ({"megatron_config": {"tp": 2}}, ["megatron_config"]),
    "parameters of text": ({"target_parameters": "mlp.experts.gate_up_proj"}, ["target_parameters", "list of names"]),
    "two parameters": ({"target_parameters": ["q_proj.a", "q_proj.b"]}, ["q_proj", "one of 1 ", "names 2"]),
    "qalora": ({"use_qalora": True}, ["use_qalora"]),
    "block diagonal": ({"use_bdlora": {"nblocks": 2}}, ["use_bdlora"]),
    "arrow": ({"arrow_config": {"top_k": 3}}, ["arrow_config"]),
    "kasa": ({"kasa_config": {"beta": 1}}, ["kasa_config"]),
    "a variant to come": ({"use_later_lora": True}, ["use_later_lora", "not known"]),
    "settings to come": ({"later_config": {"a": 1}}, ["later_config", "not known"]),
    "pissa": ({"init_lora_weights": "pissa_niter_16"}, ["init_lora_weights", CONVERSION]),
    "olora": ({"init_lora_weights": "OLoRA"}, ["init_lora_weights", CONVERSION]),
    "corda": ({"init_lora_weights": "corda"}, ["init_lora_weights", CONVERSION]),
    "lora ga": ({"init_lora_weights": "lora_ga"}, ["init_lora_weights"]),
    "an unknown start": ({"init_lora_weights": "later"}, ["init_lora_weights", "'later'", "true"]),
    "rank 0": ({"r": 0}, ["entry r is 0"]),
    "a rank below": ({"r": -4}, ["entry r is -4"]),
    "a rank of text": ({"r": "4"}, ["entry r is '4'"]),
    "a rank of truth": ({"r": True}, ["entry r is True"]),
    "a rank of no end": ({"r": 10**30}, ["entry r is 1000"]),
    "alpha not a number": ({"lora_alpha": float("nan")}, ["entry lora_alpha is nan"]),
    "alpha without end": ({"lora_alpha": float("inf")}, ["entry lora_alpha is inf"]),
    "alpha of text": ({"lora_alpha": "8"}, ["entry lora_alpha is '8'"]),
    "a flag of text": ({"use_rslora": "false"}, ["entry use_rslora", "true or false"]),
    "patterns in a list": ({"rank_pattern": ["q_proj"]}, ["entry rank_pattern", "object"]),
    "rank 0 of a pattern": ({"rank_pattern": {"q_proj": 0}}, ["rank_pattern['q_proj'] is 0"]),
    "alpha of a pattern": ({"alpha_pattern": {"q_proj": None}}, ["alpha_pattern['q_proj'] is None"]),
    "a pattern too long": ({"alpha_pattern": {"q" * 600: 1}}, ["alpha_pattern", "600 characters"]),
    "a pattern that looks ahead": ({"rank_pattern": {"(?=q)": 1}}, ["rank_pattern", "'(?=q)'", "names out"]),
    "a pattern of many states": ({"rank_pattern": {"((a{64}){64}){64}": 1}}, ["rank_pattern", "repeats too much"]),
    "no pattern": ({"rank_pattern": {"(q": 1}}, ["rank_pattern", "'(q'"]),
    "ranks that differ": ({"r": 8}, [A, "rank 4", "rank 8", "rank_pattern"]),
    "ranks by pattern that differ": ({"rank_pattern": {".*q.*": 2}}, [A, "rank 4", "rank 2"]),
    "dora without magnitudes": ({"use_dora": True}, ["self_attn.q_proj", "lora_magnitude_vector", "use_dora"]),
    "bias that is not there": ({"lora_bias": True}, ["self_attn.q_proj", "lora_B.bias", "lora_bias"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ENTRIES)
def test_an_entry_is_refused_by_name(case: str, tmp_path: Path) -> None:
    entries, words = ENTRIES[case]
    message = refusal(folder_of(tmp_path, **entries))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    "entries",
    [
        {"init_lora_weights": "loftq", "loftq_config": {"bits": 4}},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2}},
        {"init_lora_weights": "gaussian"}, {"init_lora_weights": "orthogonal"}, {"init_lora_weights": False},
        {"peft_type": "lora"}, {"megatron_config": None, "megatron_core": "megatron.core"}, {"target_parameters": []},
        {"rank_pattern": {}, "alpha_pattern": None}, {"use_later_lora": False, "later_config": None, "later": "entry"},
        {"enable_lora": None, "merge_weights": False, "modules_to_save": None, "base_model_name_or_path": 5},
    ],
)  # fmt: skip
def test_an_entry_that_changes_nothing_is_passed_over(entries: dict[str, Any], tmp_path: Path) -> None:
    assert read_adapter(folder_of(tmp_path, **entries), BOUNDS).rank == 4


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[1, 2]", "object"), ("{", "not JSON"), ("", "not JSON"), ("[" * 100_000, "deep"),
        ('{"r": ' + "9" * 5000 + "}", "JSON"),
        (json.dumps({**CONFIG, "more": "x" * 2**20}), "1048576"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_none(text: str, word: str, tmp_path: Path) -> None:
    (folder_of(tmp_path) / "adapter_config.json").write_text(text)
    message = refusal(tmp_path)
    assert "adapter_config.json" in message and word in message


# ------------------------------------------------------------------------------------------------------------- tensors

nan, inf = torch.ones(4, 6), torch.ones(10, 4)
nan[1, 2], inf[3, 0] = float("nan"), float("-inf")
TENSORS: dict[str, tuple[dict[str, Tensor | None], list[str]]] = {
    "nan": ({A: nan}, [A, "NaN"]),
    "infinite": ({B: inf.half()}, [B, "infinite"]),
    "no A": ({A: None}, ["self_attn.q_proj", "no lora_A"]),
    "no B": ({B: None}, ["self_attn.q_proj", "no lora_B"]),
    "ranks": ({B: torch.ones(10, 3)}, [B, "[10, 3]", "[4, 6]"]),
    "turned": ({A: torch.ones(6, 4)}, ["rank", "[10, 4]", "[6, 4]"]),
    "three dimensions": ({A: torch.ones(2, 4, 6)}, [A, "[2, 4, 6]", "two dimensions"]),
    "one dimension": ({B: torch.ones(40)}, [B, "[40]"]),
    "not gathered": ({A: torch.ones(0)}, [A, "[0]", "ZeRO-3"]),
    "integers": ({A: torch.ones(4, 6, dtype=torch.int8)}, [A, "'I8'", "BF16"]),
    "float8": ({B: torch.ones(10, 4).to(torch.float8_e4m3fn)}, [B, "'F8_E4M3'"]),
    "whole integers": ({"base_model.model.ids": torch.ones(3, dtype=torch.int64)}, ["base_model.model.ids", "'I64'"]),
    "a magnitude": ({f"{PREFIX}q_proj.lora_magnitude_vector": torch.ones(10)}, ["lora_magnitude_vector", "use_dora"]),
    "a bias": ({f"{PREFIX}q_proj.lora_B.bias": torch.ones(10)}, ["lora_B.bias", "lora_bias"]),
    "two adapters": ({A.replace("A.", "A.other."): torch.ones(4, 6)}, [A, "lora_A.other.weight", "folder of its own"]),
    "both kinds": (
        {f"{PREFIX}q_proj.lora_embedding_A": torch.ones(4, 6)}, ["self_attn.q_proj", "embedding", "linear"],
    ),
    "an embedding's half": ({f"{PREFIX}e.lora_embedding_A": torch.ones(4, 6)}, ["self_attn.e'", "no lora_embedding_B"]),
    "nested": ({f"{PREFIX}e.base_layer.lora_A.weight": torch.ones(4, 6)}, ["e.base_layer", "parameters", "names 0"]),
    "token rows": (
        {f"{PREFIX}e.token_adapter.trainable_tokens_delta": torch.ones(2, 6)},
        ["token_adapter", "trainable_token_indices"],
    ),
    "an unknown part": ({f"{PREFIX}q_proj.lora_E": torch.ones(4)}, ["q_proj.lora_E", "convert"]),
    "kohya's names": ({"lora_unet_q.lora_down.weight": torch.ones(4, 6)}, ["lora_unet_q.lora_down.weight", "convert"]),
    "diffusers' names": ({"unet.q.lora.up.weight": torch.ones(4, 6)}, ["unet.q.lora.up.weight", "convert"]),
    "a bias of A": ({f"{PREFIX}q_proj.lora_A.bias": torch.ones(4)}, ["lora_A.bias", "convert"]),
    "no module": ({"base_model.model.lora_A.weight": torch.ones(4, 6)}, ["base_model.model.lora_A.weight"]),
    "an empty part": ({"base_model.model..lora_A.weight": torch.ones(4, 6)}, ["model..lora_A", "empty part"]),
    "a name of two lines": ({"base_model.model.a\nb": torch.ones(1)}, ["a\\nb", "printed"]),
    "a long name": ({"a" * 600: torch.ones(1)}, ["aaaa", "600 characters"]),
    "many bytes": ({"base_model.model.score.weight": torch.ones(2500)}, ["10256 bytes", "10000"]),
    "many tensors": ({f"base_model.model.{number}": torch.ones(1) for number in range(19)}, ["21 tensors", "20"]),
    "none of LoRA": ({A: None, B: None, "score.weight": torch.ones(2)}, ["no tensor of LoRA"]),
    "nothing": ({A: None, B: None}, ["no tensor of LoRA"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, words = TENSORS[case]
    message = refusal(folder_of(tmp_path, changes))
    assert [word for word in words if word not in message] == []


def test_magnitudes_and_biases_have_the_modules_outputs(tmp_path: Path) -> None:
    for name, entry in (("lora_magnitude_vector", "use_dora"), ("lora_B.bias", "lora_bias")):
        message = refusal(folder_of(tmp_path, {f"{PREFIX}q_proj.{name}": torch.ones(4)}, **{entry: True}))
        assert f"q_proj.{name}" in message and "[4]" in message and "10 outputs" in message


def test_a_rank_above_the_bound_names_the_one_that_is_needed(tmp_path: Path) -> None:
    more = {A.replace("q_proj", "v_proj"): torch.ones(24, 6), B.replace("q_proj", "v_proj"): torch.ones(10, 24)}
    message = refusal(folder_of(tmp_path, more, rank_pattern={"v_proj": 24}))
    assert "self_attn.v_proj" in message and "raise max_lora_rank to 24" in message


# --------------------------------------------------------------------------------------------------------------- files


def whole(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int = 0, end: int = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["cut short"]),
    "seven bytes": (b"\0" * 7, ["cut short"]),
    "a header beyond the end": (whole({}, length=2**40), ["cut short"]),
    "a header that is large": (whole(b" " * (tensor_file.MAX_HEADER + 1)), ["header of 33554433"]),
    "no JSON": (whole(b"{]"), ["header is not JSON"]),
    "no text": (whole(b"\xff\xfe"), ["header is not JSON"]),
    "a deep header": (whole(b"[" * 200_000), ["header is not JSON"]),
    "a list": (whole([]), ["header is a list"]),
    "a name twice": (whole(b'{"a": %s, "a": %s}' % (2 * (json.dumps(entry()).encode(),)), b"\0" * 4), ["'a' twice"]),
    "no entry": (whole({"a": 5}), ["'a'", "no dtype"]),
    "no offsets": (whole({"a": {"dtype": "F32", "shape": []}}), ["'a'", "data_offsets"]),
    "an unknown dtype": (whole({"a": entry(dtype="F4")}, b"\0" * 4), ["'a'", "'F4'"]),
    "a dtype of no text": (whole({"a": entry(dtype=["F32"])}, b"\0" * 4), ["'a'", "dtype"]),
    "a size below": (whole({"a": entry(shape=(-1,))}, b"\0" * 4), ["'a'", "[-1]"]),
    "a size of truth": (whole({"a": entry(shape=(True,))}, b"\0" * 4), ["'a'", "[True]"]),
    "a size of no end": (whole({"a": entry(shape=(2**60, 2**60))}, b"\0" * 4), ["'a'", "shape"]),
    "a product beyond": (whole({"a": entry(shape=(2**40, 2**40))}, b"\0" * 4), ["'a'", "needs"]),
    "many dimensions": (whole({"a": entry(shape=(1,) * 9)}, b"\0" * 4), ["'a'", "shape"]),
    "a shape of text": (whole({"a": entry(shape="1")}, b"\0" * 4), ["'a'", "shape"]),
    "turned offsets": (whole({"a": entry(4, 0)}, b"\0" * 4), ["'a'", "[4, 0]"]),
    "a size that lies": (whole({"a": entry(0, 8)}, b"\0" * 8), ["'a'", "needs 4 bytes"]),
    "beyond the end": (whole({"a": entry(0, 400, (100,))}, b"\0" * 4), ["4 bytes of tensors", "400"]),
    "an overlap": (whole({"a": entry(), "b": entry()}, b"\0" * 4), ["'b'", "byte 0"]),
    "a hole": (whole({"a": entry(4, 8)}, b"\0" * 8), ["'a'", "byte 4"]),
    "more than is named": (whole({"a": entry()}, b"\0" * 12), ["12 bytes of tensors"]),
    "metadata alone": (whole({"__metadata__": {"a": "b"}}), ["no tensor of LoRA"]),
    "a pickle": (b"\x80\x02}q\x00." + b"\0" * 64, ["cut short"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_lies_is_refused(case: str, tmp_path: Path) -> None:
    content, words = FILES[case]
    (folder_of(tmp_path) / "adapter_model.safetensors").write_bytes(content)
    message = refusal(tmp_path)
    assert "adapter_model.safetensors" in message and [word for word in words if word not in message] == []
    if "no tensor" not in message:
        with pytest.raises(AdapterError):
            adapter_digest(tmp_path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    content = save(tensors())
    file = folder_of(tmp_path) / "adapter_model.safetensors"
    for length in range(0, len(content), 7):
        file.write_bytes(content[:length])
        refusal(tmp_path)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further than a buffer reaches."""
    file = folder_of(tmp_path, {A: torch.ones(4, 20_000)}) / "adapter_model.safetensors"
    read_header = tensor_file.read_header

    def cut(*arguments: Any) -> Any:
        entries = read_header(*arguments)
        os.truncate(file, 300)
        return entries

    monkeypatch.setattr(tensor_file, "read_header", cut)
    assert "is cut short" in refusal(tmp_path, LoRABounds(max_rank=16))


def test_a_bound_is_checked_before_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_read", lambda *arguments: pytest.fail("a tensor was read"))
    folder_of(tmp_path, {"base_model.model.score.weight": torch.ones(2500)})
    assert "10256 bytes" in refusal(tmp_path)


PLACES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no folder": (lambda place: None, ["no folder"]),
    "a file": (lambda place: place.write_text("{}"), ["no folder"]),
    "an empty folder": (lambda place: place.mkdir(), ["no adapter_config.json"]),
    "a model": (lambda place: (place.mkdir(), (place / "config.json").write_text("{}")), ["is a model"]),
    "checkpoints": (
        lambda place: (
            (place / "checkpoint-5").mkdir(parents=True)
            or (place / "checkpoint-5" / "adapter_config.json").write_text("{}")
        ),
        ["checkpoint-5"],
    ),
    "a pickle": (
        lambda place: (
            place.mkdir(),
            (place / "adapter_config.json").write_text(json.dumps(CONFIG)),
            (place / "adapter_model.bin").write_bytes(b"\x80"),
        ),
        ["adapter_model.bin", "unpickled", "save_pretrained"],
    ),
    "no tensors": (
        lambda place: (place.mkdir(), (place / "adapter_config.json").write_text(json.dumps(CONFIG))),
        ["no adapter_model.safetensors"],
    ),
    "a pipe": (
        lambda place: (
            place.mkdir(),
            (place / "adapter_config.json").write_text(json.dumps(CONFIG)),
            os.mkfifo(place / "adapter_model.safetensors"),
        ),
        ["adapter_model.safetensors"],
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_folder_that_holds_no_adapter_is_refused(case: str, tmp_path: Path) -> None:
    make, words = PLACES[case]
    make(tmp_path / "place")
    message = refusal(tmp_path / "place")
    assert [word for word in words if word not in message] == []
    with pytest.raises(AdapterError) as caught:
        adapter_digest(tmp_path / "place")
    assert str(caught.value) == message


def test_what_is_not_read_is_not_written(tmp_path: Path) -> None:
    for config, changes, word in (
        ({**CONFIG, "peft_type": "IA3"}, {}, "peft_type"),
        (CONFIG, {A: torch.ones(4, 6, dtype=torch.int32)}, "int32"),
        ({**CONFIG, "more": object()}, {}, "object"),
    ):
        with pytest.raises(AdapterError, match=word):
            write_adapter(tmp_path / "made", config, {**tensors(), **changes})
    assert not (tmp_path / "made").exists()

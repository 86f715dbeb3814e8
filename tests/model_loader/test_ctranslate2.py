"""Whisper models in CTranslate2's folders: every tensor by transformers' name, and hostile files as one clear error."""

import copy
import json
import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from quintet.hub.resolve import load_model_config
from quintet.model_loader.ctranslate2 import (
    CTranslate2File,
    config_of,
    generation_config_of,
    is_ctranslate2,
    state_dict_of,
)
from quintet.model_loader.weight_files import WeightFiles

TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
Variables = dict[str, np.ndarray]
SIZES = {
    "vocab_size": 51865 + 1, "d_model": 8, "num_mel_bins": 12, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24,
    "max_source_positions": 10, "max_target_positions": 14, "pad_token_id": 50257, "bos_token_id": 50257,
    "eos_token_id": 50257, "decoder_start_token_id": 50258,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> WhisperForConditionalGeneration:
    torch.manual_seed(5)
    made = WhisperForConditionalGeneration(WhisperConfig(**SIZES)).eval()
    for each in made.parameters():  # biases and norms begin as zeros and ones
        each.data.copy_(torch.randn_like(each) * 0.2)
    return made


def variables_of(state: Mapping[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of transformers' Whisper by CTranslate2's names."""
    yield from ((f"{part}/num_heads", np.int16(SIZES[f"{part}_attention_heads"])) for part in ("encoder", "decoder"))
    yield "decoder/pre_norm", np.int8(1)
    for part in ("encoder", "decoder"):
        outer, get = f"model.{part}", lambda name: state[name].numpy()
        yield f"{part}/position_encodings/encodings", get(f"{outer}.embed_positions.weight")
        yield from norm(f"{part}/layer_norm", state, f"{outer}.layer_norm")
        for index in range(int(SIZES[f"{part}_layers"])):
            to, at = f"{part}/layer_{index}", f"{outer}.layers.{index}"
            names = {"self_attn": "self_attention"} | ({"encoder_attn": "attention"} if part == "decoder" else {})
            for theirs, ours in names.items():
                yield from norm(f"{to}/{ours}/layer_norm", state, f"{at}.{theirs}_layer_norm")
                split = ("qkv", "o") if theirs == "self_attn" else ("q", "kv", "o")
                for number, letters in enumerate(split):
                    sources = [f"{at}.{theirs}.{'out' if each == 'o' else each}_proj" for each in letters]
                    yield f"{to}/{ours}/linear_{number}/weight", np.concatenate([get(f"{s}.weight") for s in sources])
                    biases = [state.get(f"{s}.bias", torch.zeros(8)).numpy() for s in sources]
                    yield f"{to}/{ours}/linear_{number}/bias", np.concatenate(biases)
            yield from norm(f"{to}/ffn/layer_norm", state, f"{at}.final_layer_norm")
            for number in (0, 1):
                for last in ("weight", "bias"):
                    yield f"{to}/ffn/linear_{number}/{last}", get(f"{at}.fc{number + 1}.{last}")
    for name in ("conv1", "conv2"):
        for last in ("weight", "bias"):
            yield f"encoder/{name}/{last}", state[f"model.encoder.{name}.{last}"].numpy()
    yield "decoder/embeddings/weight", state["model.decoder.embed_tokens.weight"].numpy()


def norm(to: str, state: Mapping[str, Tensor], at: str) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{to}/gamma", state[f"{at}.weight"].numpy()
    yield f"{to}/beta", state[f"{at}.bias"].numpy()


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def content(variables: Mapping[str, Any], aliases: Mapping[str, str] | None = None, spec: str = "WhisperSpec") -> bytes:
    """The bytes of a model.bin. Source: CTranslate2's python/ctranslate2/specs/model_spec.py."""
    out = [struct.pack("<I", 6), text(spec), struct.pack("<I", 3), struct.pack("<I", len(variables))]
    for name, value in variables.items():
        value = np.asarray(value)
        out += [text(name), struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)]
        out += [struct.pack("<BI", TYPES[str(value.dtype)], value.nbytes), value.tobytes()]
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"} if aliases is None else aliases
    out += [struct.pack("<I", len(aliases)), *(text(each) for pair in aliases.items() for each in pair)]
    return b"".join(out)


def quantized(variables: Variables, kind: str) -> Variables:
    """As CTranslate2 does: products, convolutions and embeddings get integers and a scale for each row (int8), or one
    (int16)."""
    found: Variables = {}
    for name, value in variables.items():
        if name.endswith("/weight"):
            axes = tuple(range(1, value.ndim))
            scale = 127 / np.abs(value).max(axis=axes) if kind == "int8" else np.float32(2**10 / np.abs(value).max())
            spread = scale.reshape(-1, *[1] * len(axes)) if kind == "int8" else scale
            found |= {name: np.rint(value * spread).astype(kind), f"{name}_scale": np.float32(scale)}
        else:
            found[name] = value.astype(np.float16) if kind == "int8" and value.ndim else value
    return found


@pytest.fixture
def variables(model: WhisperForConditionalGeneration) -> Variables:
    return dict(variables_of(model.state_dict()))


def folder_of(path: Path, raw: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.bin").write_bytes(raw)
    settings = {"suppress_ids": [1, 2, -1], "suppress_ids_begin": [220, 50257], "alignment_heads": [[0, 1]]}
    (path / "config.json").write_text(json.dumps({**settings, "lang_ids": [50259]}))
    return path


def test_the_model_that_is_read_is_the_one_that_was_written(
    tmp_path: Path, model: WhisperForConditionalGeneration, variables: Variables
) -> None:
    folder = folder_of(tmp_path / "m", content(variables))
    again = WhisperForConditionalGeneration(WhisperConfig(**config_of(folder)))
    result = again.load_state_dict(state_dict_of(folder), strict=False)
    again.tie_weights()
    assert (result.missing_keys, result.unexpected_keys) == (["proj_out.weight"], [])  # tied
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    mel, ids = torch.randn(1, 12, 20), torch.tensor([[50258, 7, 9]])
    with torch.no_grad():
        assert torch.equal(again.eval()(mel, decoder_input_ids=ids).logits, model(mel, decoder_input_ids=ids).logits)


@pytest.mark.parametrize(("kind", "steps"), [("int8", 127), ("int16", 1024)])
def test_integers_become_floats_by_their_scales(
    tmp_path: Path, model: WhisperForConditionalGeneration, variables: Variables, kind: str, steps: int
) -> None:
    state = state_dict_of(folder_of(tmp_path / "m", content(quantized(variables, kind))))
    for name, value in model.state_dict().items():
        if name in state and value.dim() > 1 and "embed_positions" not in name:
            most = value.flatten(1).abs().max(1).values if kind == "int8" else value.abs().max()
            bound = (most / steps / 2).view(-1, *[1] * (value.dim() - 1)) * 1.001
            if kind == "int16":
                bound = bound * 5  # the scale is of the joined matrix
            assert state[name].dtype == torch.float32 and ((state[name] - value).abs() <= bound).all(), name


def test_a_head_of_its_own_and_aliases_of_any_variable_are_read(tmp_path: Path, variables: Variables) -> None:
    head = np.full((SIZES["vocab_size"], 8), 3, dtype=np.float32)
    joined = dict(variables)
    del joined["encoder/layer_1/ffn/layer_norm/beta"]
    aliases = {"encoder/layer_1/ffn/layer_norm/beta": "encoder/layer_0/ffn/layer_norm/beta"}
    folder = folder_of(tmp_path / "m", content(joined | {"decoder/projection/weight": head}, aliases))
    state = state_dict_of(folder)
    assert torch.equal(state["proj_out.weight"], torch.from_numpy(head))
    beta = torch.from_numpy(variables["encoder/layer_0/ffn/layer_norm/beta"])
    assert torch.equal(state["model.encoder.layers.1.final_layer_norm.bias"], beta)
    assert config_of(folder)["tie_word_embeddings"] is False


def test_configs_are_made_of_shapes_and_of_what_the_folder_keeps(tmp_path: Path, variables: Variables) -> None:
    folder = folder_of(tmp_path / "m", content(variables))
    config = WhisperConfig(**config_of(folder))
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    made = generation_config_of(folder)
    assert made["suppress_tokens"] == [1, 2] and made["begin_suppress_tokens"] == [220, 50257]
    assert made["alignment_heads"] == [[0, 1]] and made["is_multilingual"]
    # large-v3's published ids, for its vocabulary of 51,866
    assert made["task_to_id"] == {"translate": 50359, "transcribe": 50360}
    assert (made["prev_sot_token_id"], made["no_timestamps_token_id"]) == (50362, 50364)


def test_the_loader_opens_such_a_folder_as_weights(tmp_path: Path, variables: Variables) -> None:
    folder = folder_of(tmp_path / "m", content(variables))
    assert is_ctranslate2(folder) and not is_ctranslate2(tmp_path)
    [(file, handle)] = WeightFiles(folder, "ctranslate2").open_files()
    name = "model.decoder.layers.0.encoder_attn.v_proj.weight"
    assert file == folder / "model.bin" and handle.get_slice(name).get_shape() == [8, 8]
    joined = torch.from_numpy(variables["decoder/layer_0/attention/linear_1/weight"])
    assert torch.equal(handle.get_tensor(name), joined[8:])


def test_the_config_of_such_a_folder_is_whispers(tmp_path: Path, variables: Variables) -> None:
    """Its config.json names no model; whether Whisper is served is the families' matter."""
    try:
        kind = load_model_config(folder_of(tmp_path / "m", content(variables))).model_type
    except ValueError as error:
        kind = "whisper" if "'whisper'" in str(error) else str(error)
    assert kind == "whisper"


def spoilt(variables: Variables) -> dict[str, tuple[bytes, str]]:
    """Files that are refused, and words of the reason."""
    good, head = content(variables), len(struct.pack("<I", 6) + text("WhisperSpec")) + 4
    changed = dict(variables)
    first, weight = "encoder/layer_0/ffn/linear_0/weight", variables["encoder/layer_0/ffn/linear_0/weight"]
    integers = weight.astype(np.int8)
    keys = np.ones(24, dtype=np.float32)
    return {
        "empty": (b"", "shorter than the beginning"),
        "pickle": (b"PK\x03\x04" + bytes(100), "binary version"),
        "other": (content(variables, spec="Wav2Vec2Spec"), "it is 'Wav2Vec2Spec' of revision 3"),
        "cut": (good[:-2000], "and the file ends at"),
        "longer": (good + b"x", "goes on for 1 bytes"),
        "count": (good[:head] + b"\xff\xff\xff\x7f" + good[head + 4 :], "2147483647 variables"),
        "shape": (good.replace(struct.pack("<B2I", 2, 20, 8), struct.pack("<B2I", 2, 20, 9), 1), "takes 720"),
        "huge": (good.replace(struct.pack("<B2I", 2, 20, 8), struct.pack("<B2I", 2, 2**32 - 1, 8), 1), "takes 13743"),
        "type": (good.replace(struct.pack("<BI", 0, 640), struct.pack("<BI", 9, 640), 1), "of type 9"),
        "alias": (content(variables, {"decoder/projection/weight": "decoder/none"}), "alias 'decoder/projection/w"),
        "unknown": (content(changed | {"encoder/layer_0/gate/weight": weight}), "'encoder/layer_0/gate/weight'"),
        "keys": (content(changed | {"encoder/layer_0/self_attention/linear_0/bias": keys}), "a bias of keys"),
        "scale": (content(changed | {first: integers}), "no scale for each of its rows"),
        "rows": (content(changed | {"encoder/layer_0/self_attention/linear_0/bias": keys[:23]}), "no multiple of 3"),
        "option": (content(changed | {"decoder/pre_norm": np.int8(0)}), "decoder/pre_norm is 0"),
        "layers": (content({"encoder/num_heads": np.int16(2)}, {}), "no layers of an encoder"),
    }


def test_a_hostile_file_is_one_error_that_names_it(tmp_path: Path, variables: Variables) -> None:
    for name, (raw, reason) in spoilt(variables).items():
        folder = folder_of(tmp_path / name, raw)
        with pytest.raises(ValueError) as caught:
            config_of(folder)
        message = str(caught.value)
        assert str(folder / "model.bin") in message and reason in message and "\n" not in message, (name, message)


def test_changed_bytes_never_break_the_reader_otherwise(tmp_path: Path, variables: Variables) -> None:
    small = {name: value for name, value in variables.items() if not name.startswith("decoder/emb")}
    small["decoder/embeddings/weight"] = variables["decoder/embeddings/weight"][:9]
    good, draw = content(small), random.Random(3)
    path, refused = tmp_path / "model.bin", 0
    names = [at for at in range(len(good)) if good[at : at + 3] in (b"/we", b"/bi", b"enc", b"dec")]
    for _ in range(300):
        raw = bytearray(good[: draw.randrange(len(good))] if draw.random() < 0.2 else good)
        for _ in range(draw.randint(1, 4)):
            near = draw.choice(names) + draw.randint(-8, 40)
            if 0 <= near < len(raw):
                raw[near] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        path.write_bytes(raw)
        try:
            file = CTranslate2File(path)
            assert all(file.get_tensor(name).shape == file.entry(name).shape for name in file.keys())
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 100


def test_the_converter_of_ctranslate2_writes_what_is_read(
    tmp_path: Path, model: WhisperForConditionalGeneration
) -> None:
    specs = pytest.importorskip("ctranslate2.specs", reason="pip install ctranslate2 compares with its own writer")
    from ctranslate2.converters.transformers import WhisperLoader

    assert specs.WhisperSpec
    for quantization in (None, "float16", "int8", "int8_float16", "int16"):
        spec = WhisperLoader().get_model_spec(copy.deepcopy(model))  # it quantizes in place
        spec.config.suppress_ids, spec.config.suppress_ids_begin = [1], [2]
        spec.register_vocabulary([f"t{index}" for index in range(SIZES["vocab_size"])])
        spec.validate()
        spec.optimize(quantization=quantization)
        (tmp_path / str(quantization)).mkdir()
        spec.save(str(tmp_path / str(quantization)))
        state = state_dict_of(tmp_path / str(quantization))
        assert set(state) == set(model.state_dict()) - {"proj_out.weight"}
        exact = {None: 0.0, "float16": 2e-3}.get(quantization, 0.02)
        for name, value in state.items():
            torch.testing.assert_close(value.float(), model.state_dict()[name], rtol=0, atol=exact)

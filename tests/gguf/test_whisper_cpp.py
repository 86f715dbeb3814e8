"""Whisper in whisper.cpp's files: tensors, configs, tokens and transcripts of the model; hostile files as one error."""

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, WhisperForConditionalGeneration

from benchmarks.peers.speech_files import write_ggml
from quintet import LLM, SamplingParams
from quintet.config import EngineConfig
from quintet.gguf.architectures.whisper import non_speech_tokens
from quintet.gguf.file import is_gguf, read
from quintet.gguf.whisper_cpp import letters_of_bytes, module_of
from quintet.hub.resolve import load_model_config, resolve_model
from quintet.model_loader.gguf_config import read_generation_config
from quintet.model_loader.gguf_weights import entries
from quintet.tokenizers.tokenizer import load_tokenizer
from tests.helpers.checkpoints.whisper import features_of, greedy, small_model, tone

LANGUAGES, TIMES = 3, 1501
KINDS = [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q4_0]
CORPUS = ["the quick brown fox jumps over the lazy dog, and then the other fox jumps (twice) over it. äöü 日本"] * 20


def trained() -> Tokenizer:
    """Returns a byte-level BPE tokenizer of its own words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def bytes_of(tokenizer: Tokenizer) -> list[bytes]:
    """Returns the bytes of each token."""
    byte_of = {letter: byte for byte, letter in letters_of_bytes().items()}
    names = (str(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size()))
    return [bytes(map(byte_of.__getitem__, name)) for name in names]


TEXT = bytes_of(trained())
EOT = len(TEXT)
SOT, NO_TIMESTAMPS = EOT + 1, EOT + 1 + LANGUAGES + 6
VOCAB = NO_TIMESTAMPS + 1 + TIMES


def model() -> WhisperForConditionalGeneration:
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), EOT)
    return small_model(vocab_size=VOCAB, encoder_ffn_dim=64, decoder_start_token_id=SOT, **tokens)[1]


def written(
    path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F16, tokens: Sequence[bytes] = TEXT
) -> Path:  # fmt: skip
    write_ggml(path, model().config.to_dict(), model().state_dict(), tokens, kind)
    return path


def rounded(path: Path) -> WhisperForConditionalGeneration:
    """Returns transformers' model with the numbers of a file."""
    found = {name: getattr(each, "floats", each.tensor)().float() for name, each in entries(path)}
    made = WhisperForConditionalGeneration(model().config).eval()
    absent = made.load_state_dict(found, strict=False)
    assert absent.missing_keys == ["proj_out.weight"] and not absent.unexpected_keys
    made.generation_config = GenerationConfig(**read_generation_config(path))
    return made


def test_names_are_openai_whispers() -> None:
    """As its state dict has them; the file that the other tests read is written by the reader's own table."""
    names = {
        "encoder.conv1": "encoder.conv1", "encoder.positional_embedding": "encoder.embed_positions",
        "encoder.blocks.3.attn.query": "encoder.layers.3.self_attn.q_proj",
        "encoder.blocks.0.attn_ln": "encoder.layers.0.self_attn_layer_norm",
        "encoder.blocks.0.mlp.0": "encoder.layers.0.fc1", "encoder.blocks.0.mlp.2": "encoder.layers.0.fc2",
        "encoder.blocks.0.mlp_ln": "encoder.layers.0.final_layer_norm", "encoder.ln_post": "encoder.layer_norm",
        "decoder.token_embedding": "decoder.embed_tokens", "decoder.ln": "decoder.layer_norm",
        "decoder.blocks.1.attn.out": "decoder.layers.1.self_attn.out_proj",
        "decoder.blocks.1.cross_attn.key": "decoder.layers.1.encoder_attn.k_proj",
        "decoder.blocks.1.cross_attn.value": "decoder.layers.1.encoder_attn.v_proj",
        "decoder.blocks.1.cross_attn_ln": "decoder.layers.1.encoder_attn_layer_norm",
    }  # fmt: skip
    assert {name: module_of(name) for name in names} == {name: f"model.{module}" for name, module in names.items()}
    assert module_of("decoder.blocks.1.gate") is None


def test_a_gguf_file_of_whisper_is_refused_by_its_format(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "w.gguf", "whisper")
    writer.add_tensor("encoder.conv1.weight", np.zeros((4, 4), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ValueError, match=r"w.gguf holds Whisper in another format than whisper.cpp's"):
        load_model_config(tmp_path / "w.gguf")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tensors_are_the_ones_that_were_written(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    again = rounded(written(tmp_path / "ggml-x.bin", kind)).state_dict()
    for name, want in model().state_dict().items():
        step = want.abs().max() * {"F16": 2**-10, "Q8_0": 1 / 127, "Q5_1": 1 / 15, "Q4_0": 1 / 7}[kind.name]
        assert (again[name] - want).abs().max() <= (step if want.dim() > 1 else 0), name


def test_configs_are_transformers_own(tmp_path: Path) -> None:
    path = written(tmp_path / "ggml-x.bin")
    made, want = load_model_config(path).to_dict(), model().config.to_dict()
    names = [name for name in want if name.startswith(("encoder_", "decoder_", "max_", "num_", "d_model", "vocab"))]
    assert {name: made[name] for name in names} == {name: want[name] for name in names} and len(names) > 12
    rules = read_generation_config(path)
    assert (rules["decoder_start_token_id"], rules["no_timestamps_token_id"]) == (SOT, NO_TIMESTAMPS)
    assert rules["task_to_id"] == {"translate": SOT + LANGUAGES + 1, "transcribe": SOT + LANGUAGES + 2}
    assert is_gguf(path) and resolve_model(EngineConfig.from_kwargs(model=str(path))) == path


def test_what_is_no_speech_is_found_among_the_tokens() -> None:
    """Of notes that are several tokens the first counts; '-' and letters are speech."""
    letters = letters_of_bytes()
    names = ["(", " (", "a", "-", " -", "♪", "♪♪", b"\xe2\x99", " [[", " '", "'", b"\xe2"]
    tokens = ["".join(letters[each] for each in (name if isinstance(name, bytes) else name.encode())) for name in names]
    found = non_speech_tokens([*tokens, "<|startoftranscript|>", "<|en|>", "<|nospeech|>", "<|notimestamps|>"])
    assert found == [0, 1, 4, 5, 6, 7, 8, 9, 12, 14]


def test_text_becomes_the_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    made, want = load_tokenizer(written(tmp_path / "ggml-x.bin")).backend, trained()
    for text in (*CORPUS[:1], "Fox & dog…\n\n\tjumping over", "12345 (((", "日本語 ñandú"):
        assert made.encode(text).ids == want.encode(text).ids and made.decode(made.encode(text).ids) == text
    special = "<|startoftranscript|><|zh|><|transcribe|><|notimestamps|>the<|0.02|>"
    assert made.encode(special).ids == [
        SOT,
        SOT + 2,
        SOT + LANGUAGES + 2,
        NO_TIMESTAMPS,
        *want.encode("the").ids,
        NO_TIMESTAMPS + 2,
    ]


def test_transcripts_are_transformers_own(tmp_path: Path) -> None:
    path = written(tmp_path / "ggml-x.bin")
    llm, want = LLM(str(path), device="cpu", dtype="float32", num_pages=60, use_tqdm=False), rounded(path)
    for seed, ids in enumerate(([SOT, NO_TIMESTAMPS], [SOT])):
        audio: Any = tone(seed, 1.2)
        [output] = llm.generate(
            {"prompt_token_ids": ids, "multi_modal_data": {"audio": audio}},
            SamplingParams(temperature=0, max_tokens=20, detokenize=False),
        )
        assert list(output.outputs[0].token_ids) == greedy(want, features_of(audio), ids, 20)
    llm.close()


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.name)
def test_blocks_are_computed_with_as_they_are(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Rounded activations change log-probabilities a little."""
    path, ids = written(tmp_path / "ggml-x.bin", kind), [SOT, NO_TIMESTAMPS]
    types = load_model_config(path).quantization_config["types"]
    assert types["model.decoder.layers.1.encoder_attn.v_proj"] == kind.name, "they stay blocks"
    llm, audio = LLM(str(path), device="cpu", dtype="float32", num_pages=60, use_tqdm=False), tone(1, 1.2)
    [output] = llm.generate(
        {"prompt_token_ids": ids, "multi_modal_data": {"audio": audio}},
        SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False),
    )
    with torch.inference_mode():
        logits = rounded(path)(features_of(audio), decoder_input_ids=torch.tensor([ids])).logits[0, -1]
    assert output.outputs[0].logprobs is not None
    for token, found in output.outputs[0].logprobs[0].items():
        assert abs(found.logprob - float(logits.log_softmax(-1)[token])) < 0.2
    llm.close()


def spoilt(good: bytes) -> dict[str, tuple[bytes, str]]:
    """Files that are refused, and words of the reason."""
    sizes, name = good[4:48], b"encoder.blocks.0.attn.query.weight"
    at = good.index(name) - 20
    return {
        "cut": (good[:-100], "and the file ends at"),
        "header": (good[:40], "the file ends at"),
        "sizes": (good[:4] + struct.pack("<i", -5) + good[8:], "vocab_size is -5"),
        "languages": (good[:4] + struct.pack("<i", VOCAB + 200) + good[8:], "leaves 203 languages"),
        "filters": (good[:48] + struct.pack("<i", 7) + good[52:], "mel filters are 7 by"),
        "kind": (good[: at + 8] + struct.pack("<i", 99) + good[at + 12 :], "of type 99"),
        "axes": (good[:at] + struct.pack("<i", 9) + good[at + 4 :], "has 9 axes"),
        "rows": (good[: at + 16] + struct.pack("<i", -1) + good[at + 20 :], "[-1, 32]"),
        "name": (good.replace(name, b"encoder.blocks.0.attn.wrong.weight", 1), "attn.wrong.weight"),
        "short": (b"lmgg" + sizes[:2], "fewer than"),
    }


def test_an_encoder_and_a_decoder_of_other_widths_are_refused(tmp_path: Path) -> None:
    good = written(tmp_path / "good.bin").read_bytes()
    path = tmp_path / "other.bin"
    path.write_bytes(good[:12] + struct.pack("<i", 64) + good[16:])
    with pytest.raises(ValueError, match="other.bin: the encoder has 64 features and the decoder 32"):
        load_model_config(path)


def test_a_hostile_file_is_one_error_that_names_it(tmp_path: Path) -> None:
    good = written(tmp_path / "good.bin").read_bytes()
    for name, (raw, reason) in spoilt(good).items():
        path = tmp_path / f"{name}.bin"
        path.write_bytes(raw)
        with pytest.raises(ValueError) as caught:
            read(path)
        message = str(caught.value)
        assert str(path) in message and reason in message and "\n" not in message, (name, message)


def test_changed_bytes_never_break_the_reader_otherwise(tmp_path: Path) -> None:
    path, draw, refused = tmp_path / "changed.bin", random.Random(3), 0
    good = written(tmp_path / "good.bin").read_bytes()
    heads = [at for at in range(len(good)) if good[at : at + 9] in (b"encoder.b", b"decoder.b")]
    for _ in range(60):
        raw = bytearray(good[: draw.randrange(len(good))] if draw.random() < 0.2 else good)
        for _ in range(draw.randint(1, 4)):
            near = (draw.choice(heads) if draw.random() < 0.7 else 44) + draw.randint(-40, 40)
            if 0 <= near < len(raw):
                raw[near] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        path.write_bytes(raw)
        try:
            assert sum(each.tensor().numel() for _, each in entries(path))
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 20


def test_tokens_that_an_old_converter_spoilt_are_refused_when_text_is_wanted(tmp_path: Path) -> None:
    """The first converter of whisper.cpp wrote U+FFFD for bytes that are no text by themselves."""
    tokens = [token.decode(errors="replace").encode() for token in TEXT]
    path = written(tmp_path / "ggml-x.bin", tokens=tokens)
    with pytest.raises(ValueError, match=r"give the tokenizer of the model's original with tokenizer="):
        load_tokenizer(path)

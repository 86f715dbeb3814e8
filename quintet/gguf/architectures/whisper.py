"""Whisper in whisper.cpp's files: entries of config.json and generation_config.json, and tokens not to be sampled."""

import functools
from collections.abc import Mapping, Sequence

from quintet.gguf.architectures.architecture import Architecture, Entries
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames
from quintet.gguf.whisper_cpp import ARCHITECTURE, letters_of_bytes, module_of

# What is no speech, alone or behind a space: not sampled if it is one token. Of notes, which may be several tokens, the
# first is not. Source: openai-whisper's tokenizer.py, non_speech_tokens.
_SYMBOLS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』', *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),
    " -", " '",
)  # fmt: skip
_END, _SPACE = "<|endoftext|>", "\u0120"
_NOTES = "♩♪♫♬♭♮♯"
_NOT_TEXT = ("startoftranscript", "translate", "transcribe", "startoflm", "startofprev", "nospeech")


def token_entries(eot: int, languages: int) -> Entries:
    """Returns generation_config.json's ids of special tokens, which follow from the id of <|endoftext|>."""
    task = eot + 2 + languages  # the first token behind the languages
    return {
        "bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot, "decoder_start_token_id": eot + 1,
        "is_multilingual": eot == 50257, "max_initial_timestamp_index": 50, "return_timestamps": False,
        "task_to_id": {"translate": task, "transcribe": task + 1}, "prev_sot_token_id": task + 3,
        "no_timestamps_token_id": task + 5,
    }  # fmt: skip


def non_speech_tokens(tokens: Sequence[str]) -> list[int]:
    """Returns the ids of tokens that are no speech, in their order. `tokens`: in letters of bytes."""
    ids, letters = {token: index for index, token in enumerate(tokens)}, letters_of_bytes()

    def spelled(text: str) -> str:
        return "".join(letters[each] for each in text.encode())

    symbols = {spelled(each) for symbol in _SYMBOLS for each in (symbol, f" {symbol}")}
    for note in (spelled(each) for sign in _NOTES for each in (sign, f" {sign}")):
        symbols.add(next((note[:end] for end in range(len(note), 0, -1) if note[:end] in ids), note))
    names = symbols | {f"<|{name}|>" for name in _NOT_TEXT}
    return sorted(ids[name] for name in names if name in ids)


def _tokens(model: GGUFModel) -> list[str]:
    found = model.metadata.get("tokenizer.ggml.tokens")
    tokens: list[str] = found if isinstance(found, list) else []
    if _END not in tokens:
        raise ValueError(f"{model.path} holds Whisper in another format than whisper.cpp's; quintet does not read it")
    return tokens


def _kind(model: GGUFModel) -> str:
    _tokens(model)  # of a file of another format, this says so before what it lacks
    return "whisper"


def _entries(model: GGUFModel) -> Entries:
    """Returns entries of transformers' WhisperConfig. ValueError for sizes that do not fit."""
    size, eot = model.required_number, _tokens(model).index(_END)
    width = size("text.embedding_length")
    if size("audio.embedding_length") != width:
        raise ValueError(
            f"{model.path}: the encoder has {size('audio.embedding_length')} features and the decoder {width}, which "
            "Whisper has not; fetch it again"
        )
    if model.shape("decoder.token_embedding.weight") != (size("vocab_size"), width):
        raise ValueError(f"{model.path}: its vocabulary is not the {size('vocab_size')} rows of its embedding")
    entries: Entries = {
        "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True, "d_model": width,
        "num_mel_bins": size("mel_bins"), "max_source_positions": size("audio.context_length"),
        "max_target_positions": size("text.context_length"), "activation_function": "gelu", "scale_embedding": False,
        "decoder_start_token_id": eot + 1,
    }  # fmt: skip
    for part, name in (("encoder", "audio"), ("decoder", "text")):
        entries |= {
            f"{part}_layers": size(f"{name}.block_count"), f"{part}_attention_heads": size(f"{name}.head_count"),
            f"{part}_ffn_dim": model.shape(f"{part}.blocks.0.mlp.0.weight", 2)[0],
        }  # fmt: skip
    return entries


def _generation(model: GGUFModel) -> Entries:
    """Returns entries of generation_config.json; heads that align words are not in the file."""
    tokens = _tokens(model)
    eot = tokens.index(_END)
    languages = tokens.index("<|translate|>") - eot - 2
    return {
        **token_entries(eot, languages), "max_length": model.required_number("text.context_length"),
        "suppress_tokens": non_speech_tokens(tokens),
        "begin_suppress_tokens": [*(tokens.index(each) for each in [_SPACE] if each in tokens), eot],
    }  # fmt: skip


@functools.lru_cache(maxsize=4)
def _names(model: GGUFModel) -> ArchitectureNames:
    bases = (name.rpartition(".")[0] for name in model.tensors)
    return ArchitectureNames({}, {base: module for base in bases if (module := module_of(base)) is not None})


ARCHITECTURES: Mapping[str, Architecture] = {
    ARCHITECTURE: Architecture(
        _kind,
        _names,
        _entries,
        {},
        embedding="decoder.token_embedding.weight",
        has_head_dim=False,
        generation=_generation,
    )
}

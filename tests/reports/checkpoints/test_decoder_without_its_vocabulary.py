"""A tokenizer's decoder is read by itself: to_str() writes and parses the whole vocabulary."""

from typing import Any

from tokenizers import Tokenizer, decoders, models

from quintet.tokenizers.token_bytes import TokenBytes


class WithoutDump:
    """A backend whose description may not be asked for."""

    def __init__(self, backend: Tokenizer) -> None:
        self.decoder, self.id_to_token = backend.decoder, backend.id_to_token

    def to_str(self) -> str:
        raise AssertionError("the whole tokenizer was written")


class Custom:
    def decode_chain(self, tokens: list[str]) -> list[str]:
        return tokens


def backend(decoder: Any) -> Any:
    made = Tokenizer(models.BPE({"Ġa": 0, "b": 1}, []))
    made.decoder = decoder
    return WithoutDump(made)


def test_the_decoder_alone_is_read() -> None:
    pieces = TokenBytes.read(backend(decoders.ByteLevel()))
    assert pieces is not None and pieces[0] == b" a"


def test_a_decoder_of_python_code_and_none_have_no_bytes() -> None:
    assert TokenBytes.read(backend(decoders.Decoder.custom(Custom()))) is None
    plain = Tokenizer(models.BPE({"a": 0}, []))
    assert TokenBytes.read(plain) is None

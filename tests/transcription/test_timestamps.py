"""Timestamp rules, compared with transformers' WhisperTimeStampLogitsProcessor."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from quintet.transcription.timestamps import apply_timestamp_rules, detect_language
from quintet.transcription.tokens import WhisperTokens

# A small vocabulary in Whisper's order: 12 texts, special tokens, 20 timestamps.
TOKENS = WhisperTokens(
    eot=12, sot=13, translate=16, transcribe=17, start_of_prev=18, no_timestamps=20, no_speech=19,
    languages={"en": 14, "de": 15},
)  # fmt: skip
SIZE, PROMPT = 41, [13, 14, 17]


def theirs(logits: torch.Tensor, generated: list[list[int]], first: int | None) -> torch.Tensor:
    config = SimpleNamespace(
        no_timestamps_token_id=20, eos_token_id=12, bos_token_id=12, max_initial_timestamp_index=first
    )
    rules = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))  # type: ignore[arg-type]
    return rules(torch.tensor([PROMPT + each for each in generated]), logits)


tokens = st.one_of(st.integers(0, 12), st.integers(21, SIZE - 1))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 6), st.sampled_from([None, 0, 5, 50]), st.sampled_from([0.5, 5.0]))
def test_rules_are_those_of_transformers(data: st.DataObject, length: int, first: int | None, spread: float) -> None:
    generated = data.draw(st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=1, max_size=3))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(generated), SIZE, generator=draw) * spread
    logits[:, 21:] += data.draw(st.sampled_from([-4.0, 0.0, 2.0]))
    found = apply_timestamp_rules(logits, generated, TOKENS, first)
    assert torch.equal(found, theirs(logits, generated, first))


def allowed(generated: list[int], logits: torch.Tensor | None = None) -> set[int]:
    found = apply_timestamp_rules(torch.zeros(1, SIZE) if logits is None else logits, [generated], TOKENS, 5)
    return {index for index, each in enumerate(found[0].tolist()) if each > -math.inf}


def test_rules_by_example() -> None:
    assert allowed([]) == set(range(21, 27))  # a timestamp within the first five steps
    text = torch.zeros(1, SIZE)
    text[0, :13] = 9.0  # text, or its end, is likelier than all timestamps together
    assert allowed([25, 3], text) == set(range(SIZE)) - set(range(20, 26))  # none that is not later
    assert allowed([25, 3]) == set(range(26, SIZE))  # together they are likelier than each text
    assert allowed([25, 3, 30], text) & set(range(21, SIZE)) == set(range(30, SIZE))  # the next start, or the end
    assert 3 not in allowed([25, 3, 30], text) and 12 in allowed([25, 3, 30], text)
    assert not allowed([25, 3, 30, 30]) & set(range(21, SIZE))  # text


def test_rows_of_different_lengths_are_one_batch() -> None:
    rows = [[], [25, 3], [25, 3, 30, 30, 4]]
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(2))
    together = apply_timestamp_rules(logits, rows, TOKENS)
    for index, row in enumerate(rows):
        assert torch.equal(together[index], apply_timestamp_rules(logits[index : index + 1], [row], TOKENS)[0])


def test_the_language_is_the_likeliest_of_those_that_the_model_has() -> None:
    logits = torch.zeros(SIZE)
    logits[[3, 14, 15]] = torch.tensor([99.0, 1.0, 3.0])
    found = detect_language(logits, TOKENS)
    assert list(found) == ["de", "en"] and found["de"] == pytest.approx(1 / (1 + math.exp(-2)))
    with pytest.raises(ValueError, match="English alone"):
        detect_language(logits, WhisperTokens(12, 13, 16, 17, 18, 20, 19, {}))

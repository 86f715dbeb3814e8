"""Prompts, languages and suppressed tokens."""

import pytest
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from quintet.media.audio.whisper_vocabulary import NAMES, code_of
from quintet.transcription.tokens import WhisperTokens

SPECIAL = ["endoftext", "startoftranscript", *NAMES, "translate", "transcribe", "startoflm", "startofprev", "nospeech",
           "notimestamps"]  # fmt: skip
IDS = {f"<|{name}|>": 50257 + index for index, name in enumerate(SPECIAL)}  # large-v3's
TOKENS = WhisperTokens.of_vocabulary(IDS, multilingual=True)
ENGLISH = WhisperTokens.of_vocabulary({name: each - 1 for name, each in IDS.items()}, multilingual=False)


def test_ids_are_those_of_large_v3() -> None:
    """Of its generation_config.json."""
    assert (TOKENS.eot, TOKENS.sot, TOKENS.translate, TOKENS.transcribe) == (50257, 50258, 50359, 50360)
    assert (TOKENS.start_of_prev, TOKENS.no_timestamps, TOKENS.timestamp_begin) == (50362, 50364, 50365)
    assert TOKENS.languages["en"] == 50259 and TOKENS.languages["yue"] == 50358 and TOKENS.no_speech == 50363


def test_languages_are_those_of_transformers() -> None:
    assert NAMES == LANGUAGES and list(NAMES) == list(LANGUAGES)


@pytest.mark.parametrize(
    ("given", "code"), [("en", "en"), ("EN", "en"), ("English", "en"), ("en-US", "en"), ("zh_TW", "zh"),
                        ("haitian creole", "ht"), ("jv", "jw"), ("yue", "yue")],
)  # fmt: skip
def test_a_language_is_known_by_code_and_by_name(given: str, code: str) -> None:
    assert code_of(given) == code


@pytest.mark.parametrize("given", ["", "xx", "klingon", "e n", "-"])
def test_an_unknown_language_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="ISO 639-1"):
        code_of(given)


def test_prompts() -> None:
    assert TOKENS.prompt("de") == [50258, 50261, 50360]
    assert TOKENS.prompt("de", "translate", timestamps=False) == [50258, 50261, 50359, 50364]
    assert TOKENS.prompt("en", previous=[7, 8]) == [50362, 7, 8, 50258, 50259, 50360]
    long = TOKENS.prompt("en", previous=range(1000))
    assert long[1] == 1000 - 223 and long[-4] == 999 and len(long) == 227  # half of the positions, as the reference
    assert ENGLISH.prompt(None) == ENGLISH.prompt("en") == [50257]
    assert ENGLISH.prompt(None, timestamps=False) == [50257, 50363]
    assert TOKENS.language_of(50261) == "de" and TOKENS.language_of(3) is None


def test_prompts_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="none of transcribe, translate"):
        TOKENS.prompt("en", "sing")
    with pytest.raises(ValueError, match="is not known"):
        TOKENS.prompt(None)
    for language, task in (("de", "transcribe"), (None, "translate")):
        with pytest.raises(ValueError, match="English alone"):
            ENGLISH.prompt(language, task)
    older = WhisperTokens.of_vocabulary({k: v for k, v in IDS.items() if k != "<|yue|>"}, multilingual=True)
    with pytest.raises(ValueError, match="no token for language 'yue'"):
        older.prompt("yue")
    with pytest.raises(ValueError, match=r"no <\|translate\|>"):
        WhisperTokens.of_vocabulary({k: v for k, v in IDS.items() if k != "<|translate|>"}, multilingual=True)


def test_suppressed_tokens_are_those_of_generation_config() -> None:
    config = {"suppress_tokens": [5, 3, -1], "begin_suppress_tokens": [220, 50257]}
    assert TOKENS.suppressed(config, first=False) == [3, 5]
    assert TOKENS.suppressed(config, first=True) == [3, 5, 220, 50257]
    assert TOKENS.suppressed({"suppress_tokens": None}, first=True) == []

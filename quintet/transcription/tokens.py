"""Whisper's special tokens, and the prompts made of them.

A prompt: [<|startofprev|> text before] <|startoftranscript|> [<|en|> <|transcribe|>] [<|notimestamps|>]; models of
English alone have no language and no task. Source: Radford et al. 2022, figure 1; openai-whisper's decoding.py.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.media.audio.whisper_vocabulary import NAMES, code_of

TASKS = ("transcribe", "translate")
MAX_INITIAL_TIMESTAMP = 50  # timestamps: text begins within the first second
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # of newer and older vocabularies


@dataclass(frozen=True)
class WhisperTokens:
    """Ids of a vocabulary. Text is below `eot`, timestamps are from `timestamp_begin` on."""

    eot: int  # <|endoftext|>
    sot: int  # <|startoftranscript|>
    translate: int
    transcribe: int
    start_of_prev: int
    no_timestamps: int
    no_speech: int | None
    languages: Mapping[str, int]  # by code; empty for models of English alone

    @property
    def timestamp_begin(self) -> int:
        return self.no_timestamps + 1

    @classmethod
    def of_vocabulary(cls, ids: Mapping[str, int], multilingual: bool) -> "WhisperTokens":
        """Finds the special tokens among a tokenizer's. ValueError names one that is missing.

        Vocabularies of English alone have tokens of languages too, which their models have not learned.
        """

        def special(name: str) -> int:
            if f"<|{name}|>" not in ids:
                raise ValueError(f"the tokenizer has no <|{name}|>, so that it is not Whisper's; fetch the model again")
            return ids[f"<|{name}|>"]

        no_speech = next((ids[name] for name in _NO_SPEECH if name in ids), None)
        codes = {code: ids[f"<|{code}|>"] for code in NAMES if f"<|{code}|>" in ids} if multilingual else {}
        return cls(
            eot=special("endoftext"), sot=special("startoftranscript"), translate=special("translate"),
            transcribe=special("transcribe"), start_of_prev=special("startofprev"),
            no_timestamps=special("notimestamps"), no_speech=no_speech, languages=codes,
        )  # fmt: skip

    def prompt(
        self, language: str | None, task: str = "transcribe", timestamps: bool = True, previous: Sequence[int] = (),
        max_positions: int = 448,
    ) -> list[int]:  # fmt: skip
        """Returns the tokens before the first that is generated.

        `language`: a code, or an English name; None is right only for models of English alone. `previous`: tokens of
        text before this audio, whose last max_positions // 2 - 1 are taken. ValueError for a language or a task that
        the model does not have.
        """
        if task not in TASKS:
            raise ValueError(f"task {task[:40]!r} is none of {', '.join(TASKS)}")
        kept = list(previous)[-(max_positions // 2 - 1) :] if previous else []
        start = [self.start_of_prev, *kept, self.sot] if kept else [self.sot]
        if self.languages:
            if language is None:
                raise ValueError("the language is not known; give it, or have it detected by the first token")
            if (code := code_of(language)) not in self.languages:
                raise ValueError(f"the model has no token for language {code!r}; leave it out to have it detected")
            start += [self.languages[code], self.translate if task == "translate" else self.transcribe]
        elif task == "translate" or (language is not None and code_of(language) != "en"):
            raise ValueError(
                "this model knows English alone; use a multilingual one to translate or for other languages"
            )
        return start if timestamps else [*start, self.no_timestamps]

    def language_of(self, token: int) -> str | None:
        """Returns the code of a language's token."""
        return next((code for code, each in self.languages.items() if each == token), None)

    def suppressed(self, generation_config: Mapping[str, Any], first: bool) -> Collection[int]:
        """Returns the tokens that are never sampled, by generation_config.json; with `first`, those too that no text
        begins with."""
        always, begin = (
            [each for each in generation_config.get(name) or () if each >= 0]
            for name in ("suppress_tokens", "begin_suppress_tokens")
        )
        return sorted({*always, *(begin if first else ())})

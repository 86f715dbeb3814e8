"""Until prompts carry audio."""

import pytest

from quintet.chat.prompts import Prompt
from quintet.server.http.audio import speech


@pytest.fixture(autouse=True, scope="module")
def _no_audio_in_prompts():
    old = speech.audio_prompt
    speech.audio_prompt = lambda prompt, samples, vocab: Prompt(list(prompt))
    yield
    speech.audio_prompt = old

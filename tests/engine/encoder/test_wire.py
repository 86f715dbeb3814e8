"""Audio of a request on its way to an engine process, and to the ranks."""

import numpy as np

from quintet.engine.processes import messages as wire
from quintet.engine.request import CoreRequest
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.audio.log_mel import FEATURES
from quintet.sampling_params import SamplingParams
from tests.helpers.checkpoints.whisper import BINS, PROMPT, ROWS, SOT, tone


def test_a_request_arrives_as_it_was_admitted() -> None:
    speech = SpeechInput(BINS, ROWS, (SOT,))
    item = speech.item(tone(1), "the prompt")
    assert item.fields[FEATURES].array().shape == (BINS, 2 * ROWS)
    facts = [
        CoreRequest(str(at), PROMPT, SamplingParams(n=2), (0, at), 8, salt=item.digest, encoder=item, arrival=1.0)
        for at in range(2)
    ]
    sent = wire.encode(wire.Submit.of(0, [facts]))
    found = wire.decode_to_engine(sent).requests()
    assert [each.encoder for each in found] == [item, item]
    assert len(sent) < 2 * len(item.fields[FEATURES].data), "completions of one prompt share it"


def test_the_digest_is_of_what_is_heard() -> None:
    speech, audio = SpeechInput(BINS, ROWS, (SOT,)), tone(1)
    same, other = audio.copy(), audio.copy()
    other[100] += 0.1
    found = [speech.item(each, "the prompt").digest for each in (audio, same, (audio, 16_000), other)]
    assert found[0] == found[1] == found[2] != found[3]
    assert len(found[0]) == 16
    assert SpeechInput(BINS + 1, ROWS, (SOT,)).item(audio, "the prompt").digest != found[0]


def test_silence_has_features() -> None:
    item = SpeechInput(80, 1500, (SOT,)).item(np.zeros(1, np.float32), "the prompt")
    assert np.isfinite(item.fields[FEATURES].array()).all()

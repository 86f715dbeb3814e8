"""Models that listen, see and speak: what of a checkpoint is read, and which prompts are refused."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from quintet import SamplingParams
from quintet.engine.media.rotary import RotaryIndex
from quintet.engine.request import CoreRequest
from quintet.media.items import AUDIO, IMAGE, VIDEO, DecodedMedia, MediaItem, WireArray
from quintet.media.load_processor import load_processor
from tests.e2e.media.test_videos_and_sounds import opened, prompt, tokens
from tests.helpers.media.wrappers import WRAPPERS, make, media_model, picture, save_processor, sound, video

pytest.importorskip("PIL")
SOUND, FILM = DecodedMedia(AUDIO, sound(0.7), 16000.0), DecodedMedia(VIDEO, video(4, 40, 56))


def test_parts_that_speak_are_named_and_sound_within_a_video_is_refused(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = make("qwen2_5_omni", tmp_path)
    with caplog.at_level(logging.INFO):
        llm = opened(made)
    assert "transformers' code encodes image and video and audio" in caplog.text
    assert "passed over: code2wav (1), talker (1), token2wav (1)" in caplog.text
    case = prompt(made.token_of("video"), [], {"video": [(video(4, 40, 56), {"fps": 2.0})]})
    with pytest.raises(ValueError, match="the sound of videos is not read"):
        tokens(llm, [{**case, "mm_processor_kwargs": {"use_audio_in_video": True}}])
    unfinished = prompt(f"{made.token} <|vision_start|>", [picture(40, 56)], {})
    with pytest.raises(ValueError, match="finds no positions"):
        tokens(llm, [unfinished])


def test_positions_between_whole_numbers_are_refused() -> None:
    kind, wrapper = "qwen3_omni_moe_thinker", WRAPPERS["qwen3_omni_moe_thinker"]
    index = RotaryIndex(CONFIG_MAPPING[kind](**wrapper.entries), 4096)
    ids = [259, *[261] * 8, 260]  # a video of two times two by two patches, merged to four tokens each

    def placed(seconds: float) -> Any:
        fields = {
            "video_grid_thw": WireArray.of(np.array([[2, 4, 4]])),
            "video_second_per_grid": WireArray.of(np.array([seconds], np.float32)),
        }
        item = MediaItem(VIDEO, b"x", fields, ((1, 9),))
        return index.positions(CoreRequest("0", ids, SamplingParams(), (0, 0), 1, media=(item,)))

    assert placed(2.0).prompt[0].tolist() == [0, *[1] * 4, *[27] * 4, 28]
    with pytest.raises(ValueError, match="between whole numbers; give another fps"):
        placed(0.7)


@pytest.mark.parametrize("kind, text, media, why", [
    ("qwen3_asr", "<|audio_pad|><|audio_pad|>", [SOUND, SOUND], "has 2 recordings, and this model takes one"),
    ("phi4_multimodal", "<|image|><|audio|>", [DecodedMedia(IMAGE, picture(40, 56)), SOUND],
     "images and recordings in prompts of their own"),
    ("minicpmv4_6", [258, 258], [DecodedMedia(IMAGE, picture(40, 56))] * 2, "numbers the items of a prompt"),
])  # fmt: skip
def test_media_that_a_processor_does_not_take(kind: str, text: Any, media: Any, why: str, tmp_path: Any) -> None:
    save_processor(kind, tmp_path)
    made = load_processor(media_model(kind, tmp_path, cache_bytes=2**24))
    with pytest.raises(ValueError, match=why):
        made.process(text, media, {})


def test_the_length_of_a_recording_is_written_as_it_is(tmp_path: Any) -> None:
    save_processor("vibevoice_asr", tmp_path)
    made = load_processor(media_model("vibevoice_asr", tmp_path, cache_bytes=2**24))
    text = "<|box_start|> of <|AUDIO_DURATION|> s and <|box_start|> of <|AUDIO_DURATION|> s"
    ids = made.process(text, [SOUND, DecodedMedia(AUDIO, sound(0.31), 16000.0)], {}).token_ids
    assert torch.tensor(ids).lt(256).sum() == len(" of 0.70 s and  of 0.31 s")

"""Videos and recordings behind MediaProcessor: transformers' numbers, and what is refused."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from quintet.media.items import AUDIO, IMAGE, VIDEO, DecodedMedia, VideoTimes
from quintet.media.load_processor import load_processor
from quintet.media.processes.client import ProcessorProcess
from quintet.media.processing import HFMediaProcessor
from quintet.media.processors import tensor_images
from quintet.media.processors.voxtral import WindowedFeatures
from tests.helpers.media.wrappers import WRAPPERS, media_model, picture, save_processor, sound, video

pytest.importorskip("PIL")
TIMES = VideoTimes((0, 10, 20, 30), 40, 10.0)


def processor(folder: Path, kind: str, **entries: Any) -> HFMediaProcessor:
    save_processor(kind, folder)
    return load_processor(media_model(kind, folder, **{"cache_bytes": 2**24, **entries}))


def film(frames: int = 4, seed: int = 0, times: VideoTimes | None = None) -> DecodedMedia:
    return DecodedMedia(VIDEO, video(frames, 40, 56, seed), times=times)


def test_a_still_video_has_the_patches_of_its_picture(tmp_path: Path) -> None:
    """Pillow's filter and torch's differ in the last bit of a byte; the rest of the way is the same."""
    made, frame = processor(tmp_path, "qwen2_vl"), picture(61, 83, 3)
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    still = made.process("<|video_pad|>", [DecodedMedia(VIDEO, np.stack([frame, frame]))], sizes).items[0]
    one = made.process("<|image_pad|>", [DecodedMedia(IMAGE, frame)], sizes).items[0]
    assert np.array_equal(still.fields["video_grid_thw"].array(), one.fields["image_grid_thw"].array())
    apart = np.abs(still.fields["pixel_values_videos"].array() - one.fields["pixel_values"].array())
    byte = 1 / 255 / 0.26  # of the smallest deviation by which pixels are divided
    assert apart.max() < 2.1 * byte and apart.mean() < 0.3 * byte


def test_nothing_stands_in_for_torchvision_afterwards(tmp_path: Path) -> None:
    processor(tmp_path, "qwen3_vl")
    assert not any(name.partition(".")[0] == "torchvision" for name in sys.modules)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "lanczos"])
def test_frames_are_resized_as_pillow_does(mode: str) -> None:
    from PIL import Image

    frame = picture(47, 83, 5)
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC,
               "lanczos": Image.Resampling.LANCZOS}  # fmt: skip
    want = np.asarray(Image.fromarray(frame).resize((56, 28), filters[mode]), np.int32)
    found = tensor_images.resize(torch.from_numpy(frame.transpose(2, 0, 1)[None].copy()), (28, 56), mode)
    assert np.abs(found[0].permute(1, 2, 0).numpy().astype(np.int32) - want).max() <= 2


def test_times_of_frames_are_written_into_the_prompt(tmp_path: Path) -> None:
    made = processor(tmp_path, "qwen3_vl")
    ids = made.process("<|video_pad|>", [film(times=TIMES)], {}).token_ids
    assert made._processor.tokenizer.decode(ids).count("<0.5 seconds>") == 1, "frames 0 and 10 of 10 a second"
    again = made.process("<|video_pad|>", [film(times=TIMES)], {}).token_ids
    assert again == ids and len(made.cache) == 1
    other = made.process("<|video_pad|>", [film(times=VideoTimes((0, 1, 2, 3), 4, 10.0))], {}).token_ids
    assert other != ids and len(made.cache) == 2
    chosen = made.process("<|video_pad|>", [film(8)], {"do_sample_frames": True, "fps": 12})
    assert chosen.items[0].fields["video_grid_thw"].array().tolist()[0][0] == 2


def test_a_video_without_room_is_refused_before_it_is_processed(tmp_path: Path) -> None:
    made = processor(tmp_path, "qwen2_vl", max_rows=20)
    made._parts[VIDEO]._part = SimpleNamespace(
        get_num_of_video_patches=made._parts[VIDEO].get_num_of_video_patches, merge_size=2
    )  # it cannot be called
    with pytest.raises(ValueError, match="a video takes 24 tokens, and the device has room for 20"):
        made.process("<|video_pad|>", [film()], {})


@pytest.mark.slow  # a process imports transformers
def test_a_process_of_its_own_gives_the_same(tmp_path: Path) -> None:
    made, given = processor(tmp_path, "qwen2_5_vl"), [film(times=TIMES), film(2, 3)]
    process = ProcessorProcess(media_model("qwen2_5_vl", tmp_path))
    try:
        assert process.process("<|video_pad|> <|video_pad|>", given, {}) == made.process(
            "<|video_pad|> <|video_pad|>", given, {}
        )
    finally:
        process.close()


def test_seconds_are_part_of_a_videos_digest(tmp_path: Path) -> None:
    made = processor(tmp_path, "qwen2_5_vl")
    fast, slow = (
        made.process("<|video_pad|>", [film(times=VideoTimes((0, 1, 2, 3), 4, rate))], {}).items[0]
        for rate in (2.0, 1.0)
    )
    assert fast.digest != slow.digest and fast.fields["pixel_values_videos"] == slow.fields["pixel_values_videos"]
    assert [each.fields["second_per_grid_ts"].array().tolist() for each in (fast, slow)] == [[1.0], [2.0]]


def test_media_stand_where_their_placeholders_are_whatever_their_order(tmp_path: Path) -> None:
    made = processor(tmp_path, "internvl")  # both kinds have one token
    still = DecodedMedia(IMAGE, picture(28, 28, 1))
    first = made.process("<video> then <IMG_CONTEXT>", [still, film()], {})
    last = made.process("<IMG_CONTEXT> then <video>", [still, film()], {})
    assert [each.kind for each in first.items] == [VIDEO, IMAGE] == [each.kind for each in reversed(last.items)]
    assert [each.count for each in first.items] == [16, 4]
    with pytest.raises(ValueError, match="all tokens of its images and videos, which are alike"):
        made.process(first.token_ids, [still, film()], {})
    bare = made._processor.tokenizer("<video> then <IMG_CONTEXT>")["input_ids"]
    assert made.process(bare, [still, film()], {}).items == first.items
    with pytest.raises(ValueError, match="have 2 and 4 frames, and this model's processor takes equal numbers"):
        made.process("<video><video>", [film(), film(2)], {})
    with pytest.raises(ValueError, match="has 0 placeholders '<video>' for 1 videos"):
        made.process("nothing", [film()], {})


def test_windows_of_voxtral_are_those_of_transformers() -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    sounds = [sound(0.4, 1), sound(2.3, 2)]
    theirs = VoxtralProcessor._retrieve_input_features(
        SimpleNamespace(feature_extractor=extractor), sounds, 100, sampling_rate=16000, padding=True, truncation=False,
        pad_to_multiple_of=16000, return_tensors="pt",
    )  # fmt: skip
    ours = WindowedFeatures(extractor)(sounds, sampling_rate=16000)
    assert np.array_equal(ours["input_features"], theirs.numpy()) and ours["num_windows"].tolist() == [1, 3]


@pytest.mark.parametrize("rate", [16000.5, 1e9, 0.0])
def test_a_rate_that_is_none_is_refused(rate: float, tmp_path: Path) -> None:
    made, token = processor(tmp_path, "qwen2_audio"), WRAPPERS["qwen2_audio"].specials[0]
    with pytest.raises(ValueError, match="samples a second"):
        made.process(token, [DecodedMedia(AUDIO, sound(0.5), rate)], {})
    with pytest.raises(ValueError, match="video is not served for models of type qwen2_audio; give recordings"):
        made.process(token, [film()], {})

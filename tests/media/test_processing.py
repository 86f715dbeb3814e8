"""transformers' processors behind MediaProcessor: what it counts, keeps and refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quintet.media.families import FAMILIES, why_no_media
from quintet.media.items import IMAGE, VIDEO, DecodedMedia, MediaItem
from quintet.media.load_processor import load_processor
from quintet.media.processing import HFMediaProcessor
from quintet.media.processors.made import MediaCache, ProcessedMedia
from quintet.media.spans import identity, overlaps
from tests.helpers.media.wrappers import SEEING, WRAPPERS, media_model, picture, save_processor

pytest.importorskip("PIL")


def processor(folder: Path, kind: str = "llava", **entries: Any) -> HFMediaProcessor:
    save_processor(kind, folder)
    return load_processor(media_model(kind, folder, **{"cache_bytes": 2**24, **entries}))


def image(height: int = 40, width: int = 56, seed: int = 0, uuid: str = "") -> DecodedMedia:
    return DecodedMedia(IMAGE, picture(height, width, seed), uuid=uuid)


SEVERAL = [kind for kind in SEEING if not FAMILIES[WRAPPERS[kind].model_type or kind].kinds[IMAGE].single]


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_picture_is_processed_alike_alone_and_beside_others(kind: str, tmp_path: Path) -> None:
    made, wrapper = processor(tmp_path, kind), WRAPPERS[kind]
    token = wrapper.around.format(wrapper.specials[0])
    several = [image(40, 56, 1), image(97, 13, 2), image(40, 56, 1), image(64, 64, 3)]
    together = made.process(" ".join([token] * 4), several, {}).items
    assert together[0].digest == together[2].digest and len({each.digest for each in together}) == 3
    if made.model.family.counts_pictures:  # it is one of several, and so read in another way
        alone = [made.process(token * 2, [each, image()], {}).items[0] for each in several]
    else:
        alone = [made.process(token, [each], {}).items[0] for each in several]
    assert [each.fields for each in alone] == [each.fields for each in together]
    assert [each.count for each in alone] == [each.count for each in together]


def test_items_stand_where_the_placeholders_are(tmp_path: Path) -> None:
    made = processor(tmp_path)
    done = made.process("ab<image>c<image><image>", [image(), image(seed=1), image(seed=2)], {})
    assert [each.spans for each in done.items] == [((2, 18),), ((19, 35),), ((35, 51),)]
    assert [at for at, each in enumerate(done.token_ids) if each == 258] == [*range(2, 18), *range(19, 51)]


def test_options_change_the_digest_and_the_cache_is_asked_by_content(tmp_path: Path) -> None:
    made = processor(tmp_path)
    first = made.process("<image>", [image()], {}).items[0]
    again = made.process("and <image>", [image()], {}).items[0]
    plain = made.process("<image>", [image()], {"do_normalize": False}).items[0]
    assert first.digest == again.digest != plain.digest and first.fields == again.fields != plain.fields
    assert len(made.cache) == 2


def test_a_uuid_stands_for_the_content(tmp_path: Path) -> None:
    made = processor(tmp_path)
    mine = made.process("<image>", [image(seed=1, uuid="a")], {}).items[0]
    assert made.process("<image>", [image(seed=2, uuid="a")], {}).items[0] == mine
    assert made.process("<image>", [image(seed=1, uuid="b")], {}).items[0].digest != mine.digest


@pytest.mark.parametrize("text, count, why", [
    ("no place", 1, "has 0 placeholders '<image>' for 1 images"),
    ("<image><image>", 1, "has 2 placeholders '<image>' for 1 images"),
    ("<image>", 2, "has 1 placeholders '<image>' for 2 images"),
])  # fmt: skip
def test_placeholders_and_pictures_must_agree(text: str, count: int, why: str, tmp_path: Path) -> None:
    made = processor(tmp_path)
    with pytest.raises(ValueError, match=why):
        made.process(text, [image()] * count, {})
    ids = made._processor.tokenizer(text)["input_ids"]
    with pytest.raises(ValueError, match=why):
        made.process(ids, [image()] * count, {})


def test_bounds_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="image takes 16 tokens, and the device has room for 15 .encoder_cache_rows"):
        processor(tmp_path, max_rows=15).process("<image>", [image()], {})
    with pytest.raises(ValueError, match="media take 32 tokens, and the device has room for 31"):
        processor(tmp_path, max_prompt_rows=31).process("<image><image>", [image(), image()], {})
    with pytest.raises(ValueError, match="has 2 images, and limit_mm_per_prompt allows 1"):
        processor(tmp_path, limits={"image": 1}).process("<image><image>", [image(), image()], {})
    with pytest.raises(ValueError, match="video is not served for models of type llava"):
        processor(tmp_path).process("x", [DecodedMedia(VIDEO, np.zeros((2, 4, 4, 3), np.uint8))], {})


def test_an_error_of_the_processor_is_one_bounded_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        processor(tmp_path).process("<image>", [image()], {"size": {"nonsense": ["x" * 1000] * 50}})
    assert str(caught.value).startswith("the model's processor refuses") and len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_the_cache_holds_what_was_used_last() -> None:
    def processed(size: int) -> ProcessedMedia:
        from quintet.media.items import WireArray

        return ProcessedMedia(IMAGE, b"", {"x": WireArray.of(np.zeros(size, np.uint8))}, (), 1)

    cache = MediaCache(100)
    for name in (b"a", b"b"):
        cache.put(name, processed(50))
    assert cache.find(b"a") is not None
    cache.put(b"c", processed(50))
    assert cache.find(b"b") is None and cache.find(b"a") is not None and cache.nbytes == 100
    cache.put(b"large", processed(101))
    assert cache.find(b"large") is None and len(cache) == 2


def test_pages_tell_pictures_and_their_parts_apart() -> None:
    def item(digest: bytes, *spans: tuple[int, int]) -> MediaItem:
        return MediaItem(IMAGE, digest * 16, {}, spans)

    a, b = item(b"a", (2, 6), (8, 20)), item(b"b", (2, 6), (8, 20))
    assert list(overlaps(a, 4, 10)) == [(4, 2, 2), (8, 2, 4)]
    assert identity([a], 0, 2) == identity([], 0, 8) == b""
    seen = [identity([a], 0, 8), identity([b], 0, 8), identity([a], 8, 16), identity([a], 16, 24)]
    seen += [identity([item(b"a", (3, 7))], 0, 8), identity([item(b"a", (2, 5))], 0, 8)]
    assert len(set(seen)) == len(seen)


def test_wrappers_that_are_not_served_have_a_reason() -> None:
    assert not any(why_no_media(kind) for kind in FAMILIES)
    assert "timm" in why_no_media("gemma3n") and why_no_media("another")

"""Small multimodal checkpoints with random weights and real processors, and transformers' answers to media."""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from quintet.media.families import FAMILIES, MediaModel
from quintet.media.load_processor import _processor
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.tiny import hushed
from tests.helpers.media.configs import TEXT, VOCAB, Wrapper
from tests.helpers.media.configs import WRAPPERS as FIRST
from tests.helpers.media.hearing_configs import HEARD
from tests.helpers.media.more_configs import MORE
from tests.helpers.media.newer_configs import NEWER

Picture = NDArray[np.uint8]
Media = Mapping[str, Sequence[Any]]  # kind -> items as multi_modal_data has them: videos are (frames, metadata)

WRAPPERS = {**FIRST, **MORE, **HEARD, **NEWER}
SEEING = [kind for kind, wrapper in WRAPPERS.items() if wrapper.vision]
MOVING = [kind for kind, wrapper in WRAPPERS.items() if wrapper.video_processor]
HEARING = [kind for kind, wrapper in WRAPPERS.items() if wrapper.audio or wrapper.extractor]


@dataclass
class Made:
    """A checkpoint, and transformers' model and processor of it."""

    folder: Path
    model: Any
    processor: Any
    wrapper: Wrapper
    kind: str = ""  # of the media that a test is about

    @property
    def token(self) -> str:
        """The placeholder of a picture, or of a recording where it takes none, as it stands in a text."""
        return self.wrapper.around.format(self.wrapper.specials[0])

    def token_of(self, kind: str) -> str:
        """Returns the placeholder of a video or recording, as it stands in a text."""
        wrapper = self.wrapper
        around = wrapper.around_audio if kind == "audio" and wrapper.around_audio else wrapper.around
        return around.format(_special(wrapper, kind))

    def inputs(self, text: str, pictures: Sequence[Picture], media: Media | None = None) -> dict[str, Any]:
        """Returns what the processor makes of a prompt. `media`: of other kinds."""
        from PIL import Image

        images: Any = [Image.fromarray(each) for each in pictures] or None
        if images and self.model.config.model_type == "llava_onevision":  # as its chats are processed
            images = [images]
        given: dict[str, Any] = {} if images is None else {"images": images}
        if videos := (media or {}).get("video"):
            given |= {"videos": [frames for frames, _ in videos], "do_sample_frames": False,
                      "video_metadata": [_metadata(frames, known) for frames, known in videos]}  # fmt: skip
        if sounds := (media or {}).get("audio"):
            given |= {"audio": [samples for samples, _ in sounds], "sampling_rate": sounds[0][1]}
        if not given:
            return dict(self.processor.tokenizer(text, return_tensors="pt"))
        given |= {**self.wrapper.options, "return_tensors": "pt"}
        out = self.processor(text=text, **given)
        return {name: _tensor(each) for name, each in out.items() if name != "labels"}

    def generated(self, text: str, pictures: Sequence[Picture], media: Media, count: int, vocab: int) -> list[int]:
        """Returns the tokens of transformers' generate(), below `vocab` alone: with its cache, since tokens behind a
        prompt with a slow video have positions that those of a longer prompt would not have."""
        given = self.inputs(text, pictures, media)
        given.pop("num_windows", None)
        given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        out = self.model.generate(**given, **options, suppress_tokens=list(range(vocab, VOCAB)))
        return list(out[0, given["input_ids"].shape[1] :].tolist())

    def greedy(self, text: str, pictures: Sequence[Picture], count: int, vocab: int = VOCAB) -> list[int]:
        """Returns transformers' tokens below `vocab`, each of them computed from the beginning on."""
        given = self.inputs(text, pictures)
        ids, made = given.pop("input_ids"), []
        prefix = FAMILIES[self.model.config.model_type].prefix  # marks what is generated, and no prompt
        name = "token_type_ids" if prefix or "token_type_ids" in given else "mm_token_type_ids"  # Gemma's
        types = given.pop(name, None)
        types = torch.zeros_like(ids) if prefix else types
        text_alone = not pictures and self.model.config.model_type == "blip-2"  # whose own wants pictures
        model = self.model.language_model if text_alone else self.model
        with torch.inference_mode():
            for _ in range(count):
                more = {} if types is None else {name: types}
                given["attention_mask"] = torch.ones_like(ids)
                logits = model(input_ids=ids, use_cache=False, **more, **given).logits[0, -1, :vocab]
                made.append(int(logits.argmax()))
                ids = torch.cat([ids, torch.tensor([[made[-1]]])], 1)
                types = None if types is None else torch.cat([types, torch.full_like(types[:, :1], prefix)], 1)
        return made


def _tensor(value: Any) -> torch.Tensor:
    """Returns what our processor of Voxtral gives as transformers' processors do."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    return torch.as_tensor(value)[None] if isinstance(value, list) else torch.as_tensor(value)


def _metadata(frames: Picture, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns transformers' description of all frames of a file."""
    return {"total_num_frames": len(frames), "fps": known["fps"], "frames_indices": list(range(len(frames))),
            "duration": len(frames) / known["fps"], "height": frames.shape[1], "width": frames.shape[2]}  # fmt: skip


def video(frames: int, height: int, width: int, seed: int = 0) -> Picture:
    """Returns frames of soft shapes that change."""
    return np.stack([picture(height, width, 100 * seed + at) for at in range(frames)])


def sound(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """Returns tones at 16 kHz, with some noise."""
    random = np.random.default_rng(seed)
    times = np.arange(round(seconds * 16000)) / 16000
    tones = sum(np.sin(2 * np.pi * random.uniform(100, 4000) * times) for _ in range(3))
    return (0.2 * tones + 0.05 * random.standard_normal(len(times))).astype(np.float32)


def picture(height: int, width: int, seed: int = 0) -> Picture:
    """Returns a picture of soft random shapes: neither noise nor one colour."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows * random.uniform(0.05, 0.9) + columns * random.uniform(0.05, 0.9)) for _ in range(3)]
    return (np.stack(waves, -1) * 100 + 128 + random.integers(-20, 20, 3)).clip(0, 255).astype(np.uint8)


ONE, TWO = picture(40, 56, 1), picture(31, 90, 2)


def picture_prompts(made: Made) -> dict[str, tuple[str, list[Picture]]]:
    """Returns prompts, with the pictures of each."""
    here = made.token
    return {
        "none": ("Hello there", []),
        "one": (f"What is {here} this?", [ONE]),
        "odd": (f"{here}tall", [picture(97, 13, 4)]),
        "two": (f"{here}{here} both", [ONE, TWO]),
    }


def tokenizer(wrapper: Wrapper) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes: 256 is its BOS, 257 its EOS, and the special ones follow."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", **wrapper.named}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.add_tokens([AddedToken(each, special=True) for each in wrapper.specials])
    tokens = ["<s>", "</s>", *wrapper.specials]
    assert made.convert_tokens_to_ids(tokens) == list(range(256, 256 + len(tokens)))
    return made


def save_processor(kind: str, folder: Path) -> None:
    """Saves the processor of a small wrapper."""
    wrapper = WRAPPERS[kind]
    own = wrapper.like or kind
    tokenizer(wrapper).save_pretrained(folder)
    if wrapper.image_processor:
        named = IMAGE_PROCESSOR_MAPPING_NAMES[own]
        if "pil" in named:
            getattr(transformers, named["pil"])(**wrapper.image_processor).save_pretrained(folder)
        else:  # its class needs torchvision, or our functions in the place of torchvision's
            entries = {"image_processor_type": named["torchvision"], **wrapper.image_processor}
            (folder / "preprocessor_config.json").write_text(json.dumps(entries))
    if wrapper.audio or wrapper.extractor:
        seen = folder / "preprocessor_config.json"  # one file for both, as published
        entries = json.loads(seen.read_text()) if wrapper.image_processor else {}
        getattr(transformers, wrapper.extractor_class)(**wrapper.extractor).save_pretrained(folder)
        seen.write_text(json.dumps({**entries, **json.loads(seen.read_text())}))
    if wrapper.video_processor:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(wrapper.video_processor))
    settings = {"processor_class": PROCESSOR_MAPPING_NAMES[own], **wrapper.processor}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def _special(wrapper: Wrapper, kind: str) -> str:
    """Returns the token that stands for a video or recording."""
    at = 1 if "<so_embedding>" in wrapper.specials else 0
    named = (each for each in wrapper.specials if kind in each.lower() and (wrapper.vision or each == "<|audio|>"))
    return next(named, wrapper.specials[at])


def media_model(name: str, folder: Path, **entries: Any) -> MediaModel:
    """Returns the description of a small wrapper's media, of all kinds that it takes."""
    kind, wrapper = WRAPPERS[name].model_type or name, WRAPPERS[name]
    ids = dict(zip(wrapper.specials, range(258, 258 + len(wrapper.specials)), strict=True))
    tokens = {}
    for each, facts in FAMILIES[kind].kinds.items():
        if kind.startswith("gemma4") and (each == "audio") != bool(wrapper.audio):
            continue
        own = not facts.token.startswith("image")
        tokens[each] = ids[_special(wrapper, each)] if own else 258
    return MediaModel(kind, str(folder), tokens, **entries)


def make(name: str, folder: Path, **changes: Any) -> Made:
    """Saves a small checkpoint of a wrapper. `changes`: entries of its config."""
    wrapper, kind = WRAPPERS[name], WRAPPERS[name].model_type or name
    if kind == "gemma4_unified":
        # transformers 5.23 has this mask of Gemma 4's, and forward() calls Gemma 3's, in which tokens of a picture see
        # one another in layers that see all, too
        theirs: Any = importlib.import_module("transformers.models.gemma4_unified.modeling_gemma4_unified")
        theirs.create_masks_for_generate = theirs.create_masks_for_vision_model
    encoders = {"vision_config": wrapper.vision, "audio_config": wrapper.audio}
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        entries = {
            **({**TEXT, **wrapper.text} if wrapper.flat else {"text_config": {**TEXT, **wrapper.text}}),
            **{name: each for name, each in encoders.items() if each},
            wrapper.token_entry: 258, "tie_word_embeddings": False, **wrapper.entries, **changes,
        }  # fmt: skip
        config = CONFIG_MAPPING[kind](**({wrapper.part: entries, **wrapper.beside} if wrapper.part else entries))
        named = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}[kind]
        model = getattr(transformers, named if isinstance(named, str) else named[0])(config).float().eval()
        scatter(model)
        model.save_pretrained(folder)
    if wrapper.extra:
        file = folder / "model.safetensors"
        save_file({**load_file(file), **{each: torch.zeros(2) for each in wrapper.extra}}, file, {"format": "pt"})
    save_processor(name, folder)
    if wrapper.flat:  # encoders of Phi-4-multimodal look back alone where no item of a batch is filled up: a mistake
        for module in model.model.embed_tokens_extend.modules():
            module.is_causal = False
    part = getattr(model, wrapper.part.removesuffix("_config")) if wrapper.part else model
    return Made(folder, part, _processor(media_model(name, folder)), wrapper)

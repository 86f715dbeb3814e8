"""Small multimodal checkpoints with random weights and real processors, and transformers' answers to media."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
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

Picture = NDArray[np.uint8]
Media = Mapping[str, Sequence[Any]]  # kind -> items as multi_modal_data has them: videos are (frames, metadata)
VOCAB = 320
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 257, "tie_word_embeddings": False,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "projection_dim": 32,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "vision_use_head": False,
}  # fmt: skip
SQUARE = {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28}}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}


@dataclass(frozen=True)
class Wrapper:
    """A small model of one type."""

    text: dict[str, Any]  # its text model, beside TEXT
    vision: dict[str, Any] = field(default_factory=dict)
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)  # of the wrapper's own config
    specials: tuple[str, ...] = ("<image>",)  # tokens, the first of which stands for a picture
    named: Mapping[str, str] = field(default_factory=dict)  # attributes of the tokenizer
    token_entry: str = "image_token_id"
    around: str = "{}"  # a placeholder in a text
    like: str = ""  # the model_type whose processor it has, if not its own
    model_type: str = ""  # if not the name of it here
    video_processor: dict[str, Any] = field(default_factory=dict)  # empty: it takes no videos
    audio: dict[str, Any] = field(default_factory=dict)  # its encoder of sound
    extractor: dict[str, Any] = field(default_factory=dict)  # of sound


QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
QWEN_IDS = {"vision_start_token_id": 259, "vision_end_token_id": 260, "video_token_id": 261}
QWEN_PIXELS = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
               "size": {"shortest_edge": 64, "longest_edge": 2048}}  # fmt: skip
QWEN_FRAMES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
               "size": {"shortest_edge": 64, "longest_edge": 1024}}  # fmt: skip
QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN35 = {
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
                        "partial_rotary_factor": 0.5},
}  # fmt: skip
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
TILES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": True}
ROWS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>", "<row_1_col_2>",
        "<row_2_col_1>", "<row_2_col_2>")  # fmt: skip
INTERN = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
IDEFICS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 56, "patch_size": 7,
}  # fmt: skip
WRAPPERS = {
    "llava": Wrapper(
        {"model_type": "llama"}, CLIP, SQUARE,
        {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        {"image_seq_length": 16}, token_entry="image_token_index",
    ),
    "llava_next": Wrapper(
        {"model_type": "mistral"}, CLIP,
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        {"image_seq_length": 16, "image_grid_pinpoints": PINPOINTS}, token_entry="image_token_index",
    ),
    "llava_onevision": Wrapper(
        {"model_type": "qwen2"}, SIGLIP, {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        {"image_grid_pinpoints": PINPOINTS, "video_token_index": 259}, specials=("<image>", "<video>"),
        token_entry="image_token_index", video_processor={"size": {"height": 28, "width": 28}},
    ),
    "qwen2_vl": Wrapper(
        {"model_type": "qwen2_vl_text", **SECTIONS},
        {**QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES,
    ),
    "qwen2_5_vl": Wrapper(
        {"model_type": "qwen2_5_vl_text", **SECTIONS},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16,
         "fullatt_block_indexes": [1]},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES,
    ),
    "qwen3_vl": Wrapper(
        {"model_type": "qwen3_vl_text", **SECTIONS},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
         "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES,
    ),
    "qwen3_vl_moe": Wrapper(
        {"model_type": "qwen3_vl_moe_text", **SECTIONS, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
         "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES, like="qwen3_vl",
    ),
    "qwen3_5": Wrapper(
        {"model_type": "qwen3_5_text", **QWEN35},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
         "num_position_embeddings": 64, "deepstack_visual_indexes": []},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES, like="qwen3_vl",
    ),
    "qwen3_5_moe": Wrapper(
        {"model_type": "qwen3_5_moe_text", **QWEN35, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
         "num_position_embeddings": 64, "deepstack_visual_indexes": []},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES, like="qwen3_vl",
    ),
    "idefics3": Wrapper(
        {"model_type": "llama"}, IDEFICS, TILES, {"image_seq_len": 4}, {"scale_factor": 2}, specials=("<image>", *ROWS),
    ),
    "smolvlm": Wrapper(
        {"model_type": "llama"}, IDEFICS, TILES, {"image_seq_len": 4}, {"scale_factor": 2},
        specials=("<image>", *ROWS, "<video>"),
        video_processor={"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
    ),
    "gemma3": Wrapper(
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "sliding_window": 20, "query_pre_attn_scalar": 16},
        SIGLIP, {"size": {"height": 28, "width": 28}}, {"image_seq_length": 16}, {"mm_tokens_per_image": 16},
        specials=("<image_soft_token>", "<start_of_image>", "<end_of_image>"), around="<start_of_image>",
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "mistral3": Wrapper(
        {"model_type": "mistral"}, PIXTRAL, {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 7, "spatial_merge_size": 2}, {"spatial_merge_size": 2, "vision_feature_layer": -1},
        specials=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), token_entry="image_token_index",
    ),
    "pixtral": Wrapper(
        {"model_type": "mistral"}, PIXTRAL, {"size": {"longest_edge": 56}, "patch_size": {"height": 7, "width": 7}},
        {"patch_size": 7, "spatial_merge_size": 1},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        specials=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), token_entry="image_token_index", like="mistral3",
        model_type="llava",
    ),
    "internvl": Wrapper(
        {"model_type": "qwen2"},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": [28, 28], "patch_size": [7, 7]},
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 4}, {"image_seq_length": 4},
        {"image_seq_length": 4}, specials=INTERN,
        named={"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
               "video_token": "<video>"},
        video_processor={"size": {"height": 28, "width": 28}},
    ),
    "qwen2_audio": Wrapper(
        {"model_type": "qwen2"}, specials=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        token_entry="audio_token_index", around="<|audio_bos|>{}<|audio_eos|>",
        audio={"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
               "num_mel_bins": 16, "max_source_positions": 50},
        extractor={"feature_size": 16, "chunk_length": 1},
    ),
    "voxtral": Wrapper(
        {"model_type": "llama"}, specials=("[AUDIO]", "[BEGIN_AUDIO]"), token_entry="audio_token_id",
        around="[BEGIN_AUDIO]{}",
        audio={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_mel_bins": 16, "max_source_positions": 50},
        extractor={"feature_size": 16, "chunk_length": 1},
    ),
}  # fmt: skip
SEEING = [kind for kind, wrapper in WRAPPERS.items() if wrapper.vision]
MOVING = [kind for kind, wrapper in WRAPPERS.items() if wrapper.video_processor]
HEARING = [kind for kind, wrapper in WRAPPERS.items() if wrapper.audio]


@dataclass
class Made:
    """A checkpoint, and transformers' model and processor of it."""

    folder: Path
    model: Any
    processor: Any
    wrapper: Wrapper

    @property
    def token(self) -> str:
        """The placeholder of a picture, or of a recording where it takes none, as it stands in a text."""
        return self.wrapper.around.format(self.wrapper.specials[0])

    @property
    def video_token(self) -> str:
        """The placeholder of a video, as it stands in a text."""
        return self.wrapper.around.format(next(each for each in self.wrapper.specials if "video" in each))

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
            given |= {"audio": list(sounds), "sampling_rate": 16000}
        return {name: _tensor(each) for name, each in self.processor(text=text, **given, return_tensors="pt").items()}

    def generated(self, text: str, pictures: Sequence[Picture], media: Media, count: int, vocab: int) -> list[int]:
        """Returns the tokens of transformers' generate(), below `vocab` alone: with its cache, since tokens behind a
        prompt with a slow video have positions that those of a longer prompt would not have."""
        given = self.inputs(text, pictures, media)
        given.pop("num_windows", None)
        given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        out = self.model.generate(**given, **options, suppress_tokens=list(range(vocab, VOCAB)))
        return list(out[0, given["input_ids"].shape[1] :].tolist())

    def greedy(self, text: str, pictures: Sequence[Picture], count: int) -> list[int]:
        """Returns transformers' tokens, each of them computed from the beginning on."""
        given = self.inputs(text, pictures)
        ids, made = given.pop("input_ids"), []
        given.pop("attention_mask", None)
        name = "token_type_ids" if "token_type_ids" in given else "mm_token_type_ids"  # Gemma's
        types = given.pop(name, None)
        with torch.inference_mode():
            for _ in range(count):
                more = {} if types is None else {name: types}
                made.append(int(self.model(input_ids=ids, use_cache=False, **more, **given).logits[0, -1].argmax()))
                ids = torch.cat([ids, torch.tensor([[made[-1]]])], 1)
                types = None if types is None else torch.cat([types, torch.zeros_like(types[:, :1])], 1)
        return made


def _tensor(value: Any) -> torch.Tensor:
    """Returns what our processor of Voxtral gives as transformers' processors do."""
    if isinstance(value, torch.Tensor):
        return value
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


def tokenizer(wrapper: Wrapper) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes: 256 is its BOS, 257 its EOS, and the special ones follow."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **wrapper.named)
    made.add_tokens([AddedToken(each, special=True) for each in wrapper.specials])
    named = ["<s>", "</s>", *wrapper.specials]
    assert made.convert_tokens_to_ids(named) == list(range(256, 256 + len(named)))
    return made


def save_processor(kind: str, folder: Path) -> None:
    """Saves the processor of a small wrapper."""
    wrapper = WRAPPERS[kind]
    own = wrapper.like or kind
    tokenizer(wrapper).save_pretrained(folder)
    if wrapper.image_processor:
        image_class = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[own]["pil"])
        image_class(**wrapper.image_processor).save_pretrained(folder)
    if wrapper.extractor:
        transformers.WhisperFeatureExtractor(**wrapper.extractor).save_pretrained(folder)
    if wrapper.video_processor:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(wrapper.video_processor))
    settings = {"processor_class": PROCESSOR_MAPPING_NAMES[own], **wrapper.processor}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def media_model(name: str, folder: Path, **entries: Any) -> MediaModel:
    """Returns the description of a small wrapper's media, of all kinds that it takes."""
    kind, wrapper = WRAPPERS[name].model_type or name, WRAPPERS[name]
    ids = dict(zip(wrapper.specials, range(258, 258 + len(wrapper.specials)), strict=True))
    tokens = {}
    for each, facts in FAMILIES[kind].kinds.items():
        own = facts.token == "video_token_id"
        tokens[each] = next(ids[token] for token in ids if "video" in token) if own else 258
    return MediaModel(kind, str(folder), tokens, **entries)


def make(name: str, folder: Path, **changes: Any) -> Made:
    """Saves a small checkpoint of a wrapper. `changes`: entries of its config."""
    wrapper, kind = WRAPPERS[name], WRAPPERS[name].model_type or name
    encoders = {"vision_config": wrapper.vision, "audio_config": wrapper.audio}
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](
            text_config={**TEXT, **wrapper.text}, **{name: each for name, each in encoders.items() if each},
            **{wrapper.token_entry: 258, "tie_word_embeddings": False, **wrapper.entries, **changes},
        )  # fmt: skip
        named = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}[kind]
        model = getattr(transformers, named if isinstance(named, str) else named[0])(config).float().eval()
        scatter(model)
        model.save_pretrained(folder)
    save_processor(name, folder)
    return Made(folder, model, _processor(media_model(name, folder)), wrapper)

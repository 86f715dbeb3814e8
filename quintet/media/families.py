"""Multimodal models whose media are served: what their processors give, and what their text models need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.media.kinds import AUDIO, IMAGE, VIDEO


@dataclass(frozen=True)
class KindFacts:
    """Facts about one kind of a wrapper's media."""

    fields: tuple[str, ...]  # of what the processor gives: the arguments of what encodes them
    method: str = "get_image_features"  # of the wrapper; "": it has none, and models/transformers/tower.py does
    token: str = "image_token_id"  # entry of config.json: the token in whose places rows stand
    placeholder: str = "<image>"  # of an item, in a text that a chat template without parts is given
    attribute: str = (
        ""  # of the processor: what stands for an item in a text; "": image_token, video_token, audio_token
    )
    renamed: Mapping[str, str] = field(default_factory=dict)  # field -> argument, where the names differ
    nested: bool = False  # the fields' first axis is of prompts, and the second of pictures or their tiles
    joined: bool = False  # the first two axes, of videos and frames, are one for the encoder
    even: bool = False  # the processor takes videos of one prompt with equal numbers of frames
    cut: bool = False  # the processor would cut off what is longer than its window (chunk_length seconds)
    seconds: float = 0.0  # of a recording, where the processor cuts off what is longer and does not name its window
    bare: bool = False  # the processor writes tokens at a text's ends, which are none of an item's
    processor: str = ""  # transformers' module and class, of a kind that it wants torchvision for
    timing: tuple[str, ...] = ()  # fields that positions follow from, and that nothing encodes


@dataclass(frozen=True)
class MediaFamily:
    """Facts about the media of a wrapper, by its model_type."""

    kinds: Mapping[str, KindFacts]
    part: str = ""  # entry of the config with the wrapper that has the encoders; "": the config itself is it
    # the model reads a prompt's only picture in another way than one of several (more tiles), and takes the number of
    # them as batch_num_images
    counts_pictures: bool = False
    rotary: bool = False  # tokens have three rotary positions (M-RoPE), by get_rope_index()
    deepstack: bool = False  # rows of several levels are added behind the text model's first layers
    bidirectional: bool = False  # tokens of a picture see all others of it that stand beside them
    alone: bool = False  # a prompt is a text or an item, which is one token, and its row is the model's output
    native: bool = False  # media change more than rows: transformers' code of the text model would not compute that
    prefix: bool = False  # tokens of a prompt see all of it, with pictures and without


def _images(*names: str, **facts: Any) -> dict[str, KindFacts]:
    """Facts of a wrapper's images. `facts`: of KindFacts."""
    return {IMAGE: KindFacts(names, **facts)}


_SIZED = ("pixel_values", "image_sizes")
_MASKED = ("pixel_values", "pixel_attention_mask")
_QWEN = "<|vision_start|><|{}_pad|><|vision_end|>"


def _qwen(processor: str, *timing: str) -> dict[str, KindFacts]:
    """Facts of Qwen's wrappers: images and videos are cut into patches, and have a grid of them."""
    names, word = ("pixel_values_videos", "video_grid_thw"), _QWEN.format(VIDEO)
    return {
        **_images("pixel_values", "image_grid_thw", placeholder=_QWEN.format(IMAGE)),
        VIDEO: KindFacts(names, "get_video_features", "video_token_id", word, processor=processor, timing=timing),
    }


def _glm() -> dict[str, KindFacts]:
    """Facts of GLM's wrappers."""
    return _images("pixel_values", "image_grid_thw", placeholder="<|begin_of_image|><|image|><|end_of_image|>")


def _gemma4(images: str, videos: str, seconds: float = 0.0) -> dict[str, KindFacts]:
    """Facts of Gemma 4's wrappers: patches with their places, padded to the most that there may be."""
    frames = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
    sound = ("input_features", "input_features_mask")
    return {
        **_images("pixel_values", "image_position_ids", placeholder="<|image|>", processor=images),
        VIDEO: KindFacts(frames, "get_video_features", "video_token_id", "<|video|>", processor=videos),
        AUDIO: KindFacts(sound, "get_audio_features", "audio_token_id", "<|audio|>", seconds=seconds),
    }


_QWEN2_VIDEOS = "qwen2_vl.Qwen2VLVideoProcessor"

FAMILIES = {
    "llava": MediaFamily(_images(*_SIZED)),  # image_sizes of Pixtral's processor alone
    "llava_next": MediaFamily(_images(*_SIZED)),
    "llava_onevision": MediaFamily(
        {
            **_images(*_SIZED),
            VIDEO: KindFacts(
                ("pixel_values_videos",), "get_video_features", "video_token_id", "<video>",
                processor="llava_onevision.LlavaOnevisionVideoProcessor",
            ),
        },
        counts_pictures=True,
    ),
    "qwen2_vl": MediaFamily(_qwen(_QWEN2_VIDEOS), rotary=True),
    "qwen2_5_vl": MediaFamily(_qwen(_QWEN2_VIDEOS, "second_per_grid_ts"), rotary=True),
    "qwen3_vl": MediaFamily(_qwen("qwen3_vl.Qwen3VLVideoProcessor"), rotary=True, deepstack=True),
    "qwen3_vl_moe": MediaFamily(_qwen("qwen3_vl.Qwen3VLVideoProcessor"), rotary=True, deepstack=True),
    "qwen3_5": MediaFamily(_qwen("qwen3_vl.Qwen3VLVideoProcessor"), rotary=True),
    "qwen3_5_moe": MediaFamily(_qwen("qwen3_vl.Qwen3VLVideoProcessor"), rotary=True),
    # its forward() gives the text model no positions but 0, 1, ...
    "colqwen2": MediaFamily(_images("pixel_values", "image_grid_thw", placeholder=_QWEN.format(IMAGE)), "vlm_config"),
    "colpali": MediaFamily(_images("pixel_values", bare=True), "vlm_config"),
    "clip": MediaFamily(_images("pixel_values", placeholder=""), alone=True),
    "siglip": MediaFamily(_images("pixel_values", placeholder=""), alone=True),
    "siglip2": MediaFamily(
        _images("pixel_values", "pixel_attention_mask", "spatial_shapes", placeholder=""), alone=True
    ),
    "idefics3": MediaFamily(_images(*_MASKED, nested=True)),
    "smolvlm": MediaFamily({
        **_images(*_MASKED, nested=True),
        VIDEO: KindFacts(_MASKED, placeholder="<video>", even=True, processor="smolvlm.SmolVLMVideoProcessor"),
    }),
    "gemma3": MediaFamily(_images("pixel_values", placeholder="<start_of_image>"), bidirectional=True),
    "gemma4": MediaFamily(_gemma4("", "gemma4.Gemma4VideoProcessor", 30.0), native=True),
    "gemma4_unified": MediaFamily(
        _gemma4("gemma4_unified.Gemma4UnifiedImageProcessor", "gemma4_unified.Gemma4UnifiedVideoProcessor"),
        native=True,
    ),
    "paligemma": MediaFamily(_images("pixel_values", bare=True), prefix=True),
    "mistral3": MediaFamily(_images(*_SIZED, placeholder="[IMG]")),
    "internvl": MediaFamily({
        **_images("pixel_values", placeholder="<IMG_CONTEXT>"),
        VIDEO: KindFacts(
            ("pixel_values_videos",), placeholder="<video>", renamed={"pixel_values_videos": "pixel_values"},
            joined=True, even=True, processor="internvl.InternVLVideoProcessor",
        ),
    }),
    "aya_vision": MediaFamily(_images("pixel_values")),
    "cohere2_vision": MediaFamily(_images("pixel_values", processor="cohere2_vision.Cohere2VisionImageProcessor")),
    "lighton_ocr": MediaFamily(_images(*_SIZED, placeholder="<|image_pad|>")),
    "vipllava": MediaFamily(_images("pixel_values")),
    "llava_next_video": MediaFamily({
        **_images(*_SIZED),
        VIDEO: KindFacts(
            ("pixel_values_videos",), "get_video_features", "video_token_id", "<video>",
            processor="llava_next_video.LlavaNextVideoVideoProcessor",
        ),
    }),
    "got_ocr2": MediaFamily(_images("pixel_values", placeholder="<img><imgpad></img>")),
    "qianfan_ocr": MediaFamily(_images("pixel_values", attribute="image_placeholder_token")),
    "idefics2": MediaFamily(_images(*_MASKED, nested=True)),
    "deepseek_vl": MediaFamily(_images("pixel_values", placeholder="<image_placeholder>")),
    "janus": MediaFamily(_images("pixel_values", placeholder="<image_placeholder>")),
    "exaone4_5": MediaFamily(_qwen(_QWEN2_VIDEOS)),
    "hyperclovax_vision_v2": MediaFamily(_qwen(_QWEN2_VIDEOS)),
    "video_llama_3": MediaFamily(
        _images("pixel_values", "image_grid_thw", "image_merge_sizes", placeholder="<|image_pad|>")
    ),
    "lfm2_vl": MediaFamily(
        _images(
            "pixel_values", "spatial_shapes", "pixel_attention_mask", processor="lfm2_vl.Lfm2VlImageProcessor"
        ),
    ),
    "llama4": MediaFamily(
        _images("pixel_values", method="", placeholder="<|image|>", processor="llama4.Llama4ImageProcessor")
    ),
    "deepseek_vl_hybrid": MediaFamily(
        _images("pixel_values", "high_res_pixel_values", placeholder="<image_placeholder>")
    ),
    "kimi_k25": MediaFamily(
        _images("pixel_values", "image_grid_thw", placeholder="<|media_begin|>image<|media_content|><|media_pad|>"
                "<|media_end|>", processor="kimi_k25.Kimi_K25ImageProcessor"),
    ),
    "glm4v": MediaFamily(_glm(), rotary=True),
    "glm4v_moe": MediaFamily(_glm(), rotary=True),
    "glm46v": MediaFamily(_glm(), rotary=True),
    "glm_ocr": MediaFamily(_glm(), rotary=True),
    "paddleocr_vl": MediaFamily(
        _images("pixel_values", "image_grid_thw", placeholder="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
        rotary=True,
    ),
    "qwen2_audio": MediaFamily({
        AUDIO: KindFacts(
            ("input_features", "attention_mask"), "", "audio_token_id", "<|audio_bos|><|AUDIO|><|audio_eos|>",
            renamed={"attention_mask": "feature_attention_mask"}, cut=True,
        ),
    }),
    "voxtral": MediaFamily({
        AUDIO: KindFacts(("input_features",), "get_audio_features", "audio_token_id", "[BEGIN_AUDIO][AUDIO]"),
    }),
}  # fmt: skip
# wrappers that transformers has, whose media are refused -> why
_TIMM = "its tower is built by the package timm, with which nothing was tried here"
_PARTS = "its config has the parts of a model that speaks, and media of its thinker were not tried"
REFUSED = {
    "ovis2": "tokens around a picture have embeddings of its encoder's, too, which have no place here",
    "fuyu": "pixels go into its text model through one product, and it has no encoder",
    "florence2": "its encoder reads pictures beside text, which encoders here do not",
    "gemma3n": _TIMM,
    "fast_vlm": _TIMM,
    "perception_lm": _TIMM,
    "qwen2_5_omni": _PARTS,
    "qwen3_omni_moe": _PARTS,
    "granite_speech": "a LoRA adapter of its text model is on where a prompt has sound, and off where it has none",
    "granite_speech_plus": "a LoRA adapter of its text model is on where a prompt has sound, and off where it has none",
    "mllama": "layers of its text model attend to pictures beside the text",
    "minicpmv4_6": "its processor counts pictures in the prompt, and writes their numbers",
}


@dataclass(frozen=True)
class MediaModel:
    """Media that a model takes, for the processes that admit requests. Plain data."""

    model_type: str
    folder: str  # of the processor's files; of a GGUF model, its file
    tokens: dict[str, int]  # kinds that it takes -> the token in whose places rows of an item stand
    mmproj: str = ""  # of a GGUF model: the file of its encoder
    limits: dict[str, int] = field(default_factory=dict)  # most of each kind in a prompt; a kind that is left out: any
    max_rows: int = 0  # of one item: encoder_cache_rows
    max_prompt_rows: int = 0  # of all in a prompt, where a step computes it whole; 0: no bound
    max_run: int = 0  # of tokens of one picture side by side, where they see one another; 0: no bound
    max_prefix: int = 0  # of tokens of a prompt, where they see one another; 0: they do not
    cache_bytes: int = 0  # of what processed media may take, in each process
    # numbers of a row of its encoder; 0: callers cannot give rows, since the text model needs more than them
    rows_width: int = 0

    @property
    def family(self) -> MediaFamily:
        """Facts about the model_type."""
        return FAMILIES[self.model_type]


def encoding_part(whole: Any) -> Any:
    """Returns the config of the wrapper with the encoders: of a model, or of a part of it."""
    family = FAMILIES.get(whole.model_type)
    return whole if family is None or not family.part else getattr(whole, family.part)


def attends_ahead(whole: Any) -> bool:
    """Returns whether tokens of a wrapper's pictures see one another: of some of Gemma 4's models alone."""
    text = whole.get_text_config()
    return FAMILIES[whole.model_type].bidirectional or getattr(text, "use_bidirectional_attention", None) == "vision"


def why_no_media(model_type: str) -> str:
    """Returns why media of this wrapper are not served; "" if some kinds are."""
    if model_type in FAMILIES:
        return ""
    return REFUSED.get(model_type, "it was not tried with media")

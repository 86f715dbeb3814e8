"""Multimodal models whose media are served: what their processors give, and what their text models need."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.media.kinds import AUDIO, IMAGE, VIDEO


@dataclass(frozen=True)
class KindFacts:
    """Facts about one kind of a wrapper's media."""

    fields: tuple[str, ...]  # of what the processor gives: the arguments of what encodes them
    method: str = "get_image_features"  # of the wrapper; "": it has none, and models/transformers/tower.py does
    token: str = "image_token_id"  # entry of config.json, or of a part of it: the token in whose places rows stand
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
    leads: bool = False  # a text has no placeholder: the processor writes an item's tokens before it
    single: bool = False  # the processor takes one item in a prompt
    tensors: bool = False  # the processor takes torch's tensors of its parts, and gives no others
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
    deepstack: bool = False  # further rows of a token are added to inputs of the text model's layers
    bidirectional: bool = False  # tokens of a picture see all others of it that stand beside them
    alone: bool = False  # a prompt is a text or an item, which is one token, and its row is the model's output
    native: bool = False  # media change more than rows: transformers' code of the text model would not compute that
    apart: bool = False  # encoders read an item in another way beside one of another kind: a prompt has one kind
    within: str = ""  # part of the text model that has the encoders
    numbered: bool = False  # the processor writes each item's number in the prompt
    prefix: bool = False  # tokens of a prompt see all of it, with pictures and without


def _images(*names: str, **facts: Any) -> dict[str, KindFacts]:
    """Facts of a wrapper's images. `facts`: of KindFacts."""
    return {IMAGE: KindFacts(names, **facts)}


_SIZED = ("pixel_values", "image_sizes")
_MASKED = ("pixel_values", "pixel_attention_mask")
_SOUND: dict[str, Any] = {"method": "get_audio_features", "token": "audio_token_id", "tensors": True}
_MEL = {"attention_mask": "input_features_mask"}
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


def _speech(names: tuple[str, ...], placeholder: str, **facts: Any) -> MediaFamily:
    """Facts of a model that reads recordings, by a processor of torch's tensors. `facts`: of KindFacts."""
    heard = KindFacts(names, placeholder=placeholder, **{**_SOUND, **facts})
    return MediaFamily({AUDIO: heard})


def _minicpm(video: str, image: str = "", **facts: Any) -> MediaFamily:
    """Facts of MiniCPM's wrappers, whose processors number the items. `video`, `image`: modules and beginnings of
    classes that transformers wants torchvision for."""
    names = ("pixel_values_videos", "target_sizes_videos")
    kinds = {
        **_images("pixel_values", "target_sizes", placeholder="<|image_pad|>", processor=image),
        VIDEO: KindFacts(
            names, "get_video_features", "video_token_id", "<|video_pad|>", processor=f"{video}VideoProcessor"
        ),
    }  # fmt: skip
    return MediaFamily(kinds, numbered=True, **facts)


_QWEN2_VIDEOS = "qwen2_vl.Qwen2VLVideoProcessor"


def _omni(**facts: Any) -> dict[str, MediaFamily]:
    """Facts of Qwen's models that listen, see and speak: of a thinker, and of a whole model with one in it, by the ends
    of their names. `facts`: of KindFacts, of recordings."""
    heard = KindFacts(
        ("input_features", "attention_mask"), "get_audio_features", "audio_token_id",
        "<|audio_bos|><|AUDIO|><|audio_eos|>", renamed={"attention_mask": "feature_attention_mask"}, **facts,
    )  # fmt: skip
    kinds = {**_qwen(_QWEN2_VIDEOS, "video_second_per_grid"), AUDIO: heard}
    thinker = MediaFamily(kinds, rotary=True)
    return {"_thinker": thinker, "": replace(thinker, part="thinker_config")}


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
    "lfm3_vl": MediaFamily(_qwen("qwen3_vl.Qwen3VLVideoProcessor")),
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
    "video_llava": MediaFamily({
        **_images("pixel_values_images", "pixel_values", renamed={"pixel_values_images": "pixel_values"}),
        VIDEO: KindFacts(
            ("pixel_values_videos",), "get_video_features", "video_token_id", "<video>",
            processor="video_llava.VideoLlavaVideoProcessor",
        ),
    }),
    "blip-2": MediaFamily(_images("pixel_values", placeholder="", leads=True, single=True)),
    "got_ocr2": MediaFamily(_images("pixel_values", placeholder="<img><imgpad></img>")),
    "qianfan_ocr": MediaFamily(_images("pixel_values", attribute="image_placeholder_token")),
    "granite4_vision": MediaFamily(_images(*_SIZED, method=""), deepstack=True),
    "granite_docling": MediaFamily(_images("pixel_values", "pixel_attention_mask", nested=True), deepstack=True),
    "minicpmv4_6": _minicpm("minicpmv4_6.MiniCPMV4_6"),
    "minicpmv4_7": _minicpm("minicpmv4_6.MiniCPMV4_6", rotary=True),
    "minicpm_ocr": _minicpm("minicpm_ocr.MiniCPMOcr", "minicpm_ocr.MiniCPMOcrImageProcessor"),
    # its adapters for pictures and for sound are LoRA adapters of requests
    "phi4_multimodal": MediaFamily({
        **_images(
            "image_pixel_values", "image_sizes", "image_attention_mask", "num_img_tokens", method="",
            token="vision_config.image_token_id", placeholder="<|image|>",
            processor="phi4_multimodal.Phi4MultimodalImageProcessor",
        ),
        AUDIO: KindFacts(
            ("audio_input_features", "audio_embed_sizes"), "", "audio_config.audio_token_id", "<|audio|>", tensors=True
        ),
    }, apart=True, within="embed_tokens_extend"),
    "nemotron_h_omni": MediaFamily({
        **_images(
            "pixel_values", "image_grid_hw", processor="nemotron_h_omni.NemotronH_Omni_Reasoning_V3ImageProcessor"
        ),
        AUDIO: KindFacts(
            ("input_features", "attention_mask"), placeholder="<so_embedding>", renamed=_MEL, **_SOUND
        ),
    }),
    "idefics2": MediaFamily(_images(*_MASKED, nested=True)),
    "deepseek_vl": MediaFamily(_images("pixel_values", placeholder="<image_placeholder>")),
    "janus": MediaFamily(_images("pixel_values", placeholder="<image_placeholder>")),
    "exaone4_5": MediaFamily(_qwen(_QWEN2_VIDEOS)),
    "hyperclovax_vision_v2": MediaFamily(_qwen(_QWEN2_VIDEOS)),
    "video_llama_3": MediaFamily({
        **_images("pixel_values", "image_grid_thw", "image_merge_sizes", placeholder="<|image_pad|>"),
        VIDEO: KindFacts(
            ("pixel_values_videos", "video_grid_thw", "video_merge_sizes", "video_compression_mask"), "",
            "video_token_id", "<|video_pad|>", processor="video_llama_3.VideoLlama3VideoProcessor",
        ),
    }),
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
    "deepseek_ocr2": MediaFamily(_images("pixel_values", "pixel_values_local", "num_local_patches")),
    "kimi_k25": MediaFamily(
        _images("pixel_values", "image_grid_thw", placeholder="<|media_begin|>image<|media_content|><|media_pad|>"
                "<|media_end|>", processor="kimi_k25.Kimi_K25ImageProcessor"),
    ),
    "glm4v": MediaFamily(_glm(), rotary=True),
    "glm4v_moe": MediaFamily(_glm(), rotary=True),
    "glm46v": MediaFamily(_glm(), rotary=True),
    "glmga": MediaFamily(_glm(), rotary=True),
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
    **{f"qwen2_5_omni{end}": family for end, family in _omni(cut=True).items()},
    **{f"qwen3_omni_moe{end}": replace(family, deepstack=True) for end, family in _omni().items()},
    "qwen3_asr": _speech(
        ("input_features", "attention_mask"), "<|audio_start|><|audio_pad|><|audio_end|>", renamed=_MEL, single=True
    ),
    "glmasr": _speech(
        ("input_features", "attention_mask"), "<|begin_of_audio|><|pad|><|end_of_audio|>", renamed=_MEL, single=True
    ),
    "moss_transcribe_diarize": _speech(
        ("input_features", "input_features_mask", "padding_mask"), "<|audio_start|><|audio_pad|><|audio_end|>"
    ),
    "vibevoice_asr": _speech(
        ("input_values", "padding_mask"), "<|object_ref_start|><|box_start|><|object_ref_end|>", method=""
    ),
    "voxtral": MediaFamily({
        AUDIO: KindFacts(("input_features",), "get_audio_features", "audio_token_id", "[BEGIN_AUDIO][AUDIO]"),
    }),
}  # fmt: skip
# wrappers that transformers has, whose media are refused -> why
_TIMM = "its tower is built by the package timm, which needs torchvision, and nothing was tried with them here"
_QUESTION = "its encoder reads the text of the prompt beside a picture"
REFUSED = {
    "ovis2": "tokens around a picture have embeddings of its encoder's, too, which have no place here",
    "fuyu": "pixels go into its text model through one product, and it has no encoder",
    "florence2": "its encoder reads pictures beside text, which encoders here do not",
    "gemma3n": _TIMM,
    "fast_vlm": _TIMM,
    "perception_lm": _TIMM,
    "granite_speech": "a LoRA adapter of its text model is on where a prompt has sound, and off where it has none",
    "granite_speech_plus": "a LoRA adapter of its text model is on where a prompt has sound, and off where it has none",
    "mllama": "layers of its text model attend to pictures beside the text",
    "shieldgemma2": "it classifies pictures, and its processor writes the prompts of its policies by itself",
    "cosmos3_omni": "its files name tensors as Diffusers does, and those of its tower like the text's",
    "nemo_speechlm": "its processor has a second tokenizer, for times of words, which is not loaded here",
    "vision-encoder-decoder": "its decoder attends to rows of pictures, and decoders here to those of sound or text",
    "unlimited_ocr": "layers of its text model attend to the whole prompt, and to a window of the answer",
    "glm5_next": "its encoder was not compared with transformers' here",
    "mistral_large4": "its pictures were not compared with transformers' here; those of `mistral3` are served",
    "hunyuan_vl": "tokens of its text model have four rotary positions",
    "ernie4_5_vl_moe": "tokens of pictures have experts of their own in its text model",
    "pp_chart2table": "its chat template writes all tokens of a picture, and its processor none",
    "instructblip": _QUESTION,
    "instructblipvideo": _QUESTION,
    "fun_asr_nano": "its feature extractor needs the package torchaudio, with which nothing was tried here",
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

"""Multimodal models whose pictures are served: what their processors give, and what their text models need."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MediaFamily:
    """Facts about the pictures of a wrapper, by its model_type."""

    fields: tuple[str, ...]  # of what the image processor gives: the arguments of get_image_features()
    nested: bool = False  # the fields' first axis is of prompts, and the second of pictures or their tiles
    # the model reads a prompt's only picture in another way than one of several (more tiles), and takes the number of
    # them as batch_num_images
    counts_pictures: bool = False
    rotary: bool = False  # tokens have three rotary positions (M-RoPE), by get_rope_index()
    deepstack: bool = False  # rows of several levels are added behind the text model's first layers
    bidirectional: bool = False  # tokens of a picture see all others of it that stand beside them
    placeholder: str = "<image>"  # of a picture, in a text that a chat template without parts is given


_PIXELS = ("pixel_values",)
_SIZED = ("pixel_values", "image_sizes")
_MASKED = ("pixel_values", "pixel_attention_mask")
_GRID = ("pixel_values", "image_grid_thw")
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"

FAMILIES = {
    "llava": MediaFamily(_SIZED),  # image_sizes of Pixtral's processor alone
    "llava_next": MediaFamily(_SIZED),
    "llava_onevision": MediaFamily(_SIZED, counts_pictures=True),
    "qwen2_vl": MediaFamily(_GRID, rotary=True, placeholder=_QWEN),
    "qwen2_5_vl": MediaFamily(_GRID, rotary=True, placeholder=_QWEN),
    "qwen3_vl": MediaFamily(_GRID, rotary=True, deepstack=True, placeholder=_QWEN),
    "idefics3": MediaFamily(_MASKED, nested=True),
    "smolvlm": MediaFamily(_MASKED, nested=True),
    "gemma3": MediaFamily(_PIXELS, bidirectional=True, placeholder="<start_of_image>"),
    "mistral3": MediaFamily(_SIZED, placeholder="[IMG]"),
    "internvl": MediaFamily(_PIXELS, placeholder="<IMG_CONTEXT>"),
}
# wrappers that transformers has, whose pictures are refused -> why
REFUSED = {
    "paligemma": "its text model lets all tokens of a prompt see one another, which is not computed here",
}


@dataclass(frozen=True)
class MediaModel:
    """Media that a model takes, for the processes that admit requests. Plain data."""

    model_type: str
    folder: str  # of the processor's files
    placeholder_id: int  # the token in whose places the rows of pictures stand
    limits: dict[str, int] = field(default_factory=dict)  # most of each kind in a prompt; a kind that is left out: any
    max_rows: int = 0  # of one picture: encoder_cache_rows
    max_prompt_rows: int = 0  # of all in a prompt, where a step computes it whole; 0: no bound
    max_run: int = 0  # of tokens of one picture side by side, where they see one another; 0: no bound
    cache_bytes: int = 0  # of what processed pictures may take, in each process

    @property
    def family(self) -> MediaFamily:
        """Facts about the model_type."""
        return FAMILIES[self.model_type]


def why_no_pictures(model_type: str) -> str:
    """Returns why pictures of this wrapper are not served; "" if they are."""
    if model_type in FAMILIES:
        return ""
    return REFUSED.get(model_type, "it was not tried with pictures")

"""Options for the model: its files, tokenizer, dtype and quantization."""

from dataclasses import dataclass
from typing import Any

from quintet.common.suggestions import refuse_unknown
from quintet.common.value_parsers import boolean, count, json_object, one_of, optional, text
from quintet.config.load import PATH
from quintet.config.schema.fields import choice_field, option

# What floats may become while they are loaded: bits of a weight, bits of an activation, inputs that share a scale
SCHEMES = {"int8": (8, 16, 128), "int4": (4, 16, 32), "w8a8": (8, 8, 0), "w4a8": (4, 8, 32)}
# Further ones: floats of 8 bits, with a scale for each output, tensor or block; what other libraries make
ONLINE = (*SCHEMES, "fp8", "fp8a8", "fp8_per_tensor", "fp8_per_block", "bitsandbytes", "torchao")
GROUPED = ("int8", "int4", "w4a8")  # of these a user may say how many inputs share a scale
# vLLM's names of what checkpoints may be quantized by -> what config.json calls them
WRITTEN = {
    **{name: (name,) for name in ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf", "gptq")},
    **{name: (name,) for name in ("hqq", "modelopt", "mxfp4", "quark", "torchao", "bitblas")},
    "auto-round": ("auto-round", "intel/auto-round", "inc"), "inc": ("auto-round", "intel/auto-round", "inc"),
    "awq_marlin": ("awq",), "gptq_marlin": ("gptq",), "gptq_bitblas": ("gptq",), "marlin": ("marlin", "gptq"),
    "moe_wna16": ("awq", "gptq"), "modelopt_fp4": ("modelopt",), "modelopt_mxfp8": ("modelopt",),
}  # fmt: skip
BUNDLED = "bundled"  # the model inside the package: the first run needs no download
BUNDLED_EMBED = "bundled-embed"  # the one beside it, that makes vectors of texts
BUNDLED_VISION = "bundled-vision"  # the one that answers questions about pictures
BUNDLED_DRAFT = "bundled-draft"  # the draft head of the first: a speculative_config.model
INSIDE = (BUNDLED, BUNDLED_EMBED, BUNDLED_VISION, BUNDLED_DRAFT)  # names of models, and of their folders

# The sampling defaults that a generation_config.json may set, under the names of SamplingParams.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


def _token(value: Any) -> str | bool:
    return value if isinstance(value, bool) else text(value)


def _dtype(value: Any) -> str:
    """A name; a torch.dtype is turned into one, without importing torch."""
    names = {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"}
    return str(one_of("auto", "float32", "bfloat16", "float16", **names)(str(value).removeprefix("torch.")))


def _group_size(value: Any) -> int:
    return int(one_of("32", "64", "128")(str(value)))


def _activation_bits(value: Any) -> int:
    return int(one_of("8", "16")(str(value)))


def _generation_config(value: Any) -> str:
    return "quintet" if value == "vllm" else text(value)  # the same opt-out under the name people know


@dataclass(frozen=True)
class ModelOptions:
    """Model to load."""

    model: str = option(
        BUNDLED,
        text,
        "folder, Hugging Face hub id, 'bundled', 'bundled-embed' or 'bundled-vision'",
        group="model",
        flags=("-m",),
        accepts=PATH,
    )
    tokenizer: str | None = option(
        None, optional(text), "folder or hub id, if not the model's own", group="model", accepts=f"{PATH} | None"
    )
    skip_tokenizer_init: bool = option(
        False, boolean, "load no tokenizer: prompts and outputs are token ids alone", group="model"
    )
    revision: str | None = option(None, optional(text), "branch, tag or commit of the model on the hub", group="model")
    tokenizer_revision: str | None = option(
        None, optional(text), "branch, tag or commit of the tokenizer on the hub", group="model"
    )
    download_dir: str | None = option(
        None, optional(text), "where downloads are kept; the hub's own cache if not given", group="model"
    )
    hf_token: str | bool | None = option(
        None,
        optional(_token),
        "the hub's access token; the stored one or HF_TOKEN if not given",
        group="model",
        repr=False,
    )
    dtype: str = option(
        "auto", _dtype, "of weights and activations; auto: what the model was saved in, if the device can",
        group="model", choices=("auto", "float32", "bfloat16", "float16"), accepts="str | torch.dtype",
    )  # fmt: skip
    quantization: str | None = option(
        None, optional(one_of(*dict.fromkeys((*ONLINE, *WRITTEN)))), "quantize the weights of a bfloat16, float16 or "
        "float32 checkpoint while it is loaded: int8, int4, fp8, bitsandbytes (nf4), torchao; w8a8, w4a8, fp8a8 with "
        "activations in 8 bits too. Of a quantized checkpoint its method, as vLLM names it, or nothing",
        group="model", choices=ONLINE,
    )  # fmt: skip
    quantization_group_size: int | None = option(
        None, optional(_group_size), "weights in a row that share a scale: 32, 64 or 128; the scheme's own "
        "if not given", group="model", metavar="WEIGHTS",
    )  # fmt: skip
    activation_bits: int | None = option(
        None, optional(_activation_bits), "what products with quantized weights round activations to: 8 bits for each "
        "group of weights, or 16; what the scheme or the checkpoint says if not given", group="model",
        metavar="BITS", choices=(8, 16),
    )  # fmt: skip
    model_impl: str = choice_field(
        "auto", "auto", "quintet", "transformers", vllm="quintet",
        help="whose code computes the model: quintet's file of its family; transformers' own, on quintet's cache and "
        "layers; auto: transformers' where quintet has no file", group="model",
    )  # fmt: skip
    trust_remote_code: bool = option(
        False, boolean, "run code that comes with the model: it can do whatever you can; for model_impl=transformers",
        group="model",
    )  # fmt: skip
    generation_config: str = option(
        "auto", _generation_config, "where sampling defaults come from: auto (the model's generation_config.json), "
        "quintet (none), or a folder", group="model",
    )  # fmt: skip
    override_generation_config: dict[str, Any] | None = option(
        None, optional(json_object), "sampling defaults that replace those of the generation config", group="model"
    )

    language_model_only: bool = option(
        False, boolean, "run the text model of a multimodal model alone: its encoders of images, audio and video are "
        "not loaded", group="model",
    )  # fmt: skip
    mmproj: str | None = option(
        None, optional(text), "file of the encoder of images of a GGUF model (mmproj); the one that lies beside the "
        "model if not given", group="model", flags=("-mm",), metavar="FILE", accepts=f"{PATH} | None",
    )  # fmt: skip
    enable_prompt_embeds: bool = option(
        False, boolean, "let a request bring embeddings in the place of prompt tokens", group="model"
    )
    encoder_cache_rows: int | None = option(
        None, optional(count(16)), "rows on the device that stand in the places of tokens, such as prompt embeddings, "
        "of hidden_size numbers of the model's type each; as many as a step has tokens if not given", group="model",
        metavar="N",
    )  # fmt: skip

    def _check(self) -> None:
        if self.quantization_group_size is not None and self.quantization not in GROUPED:
            raise ValueError(
                f"quantization_group_size means nothing with quantization={self.quantization!r}, where no weights "
                "share a scale in groups; leave it out, or set quantization to int8, int4 or w4a8"
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ValueError("skip_tokenizer_init=True loads no tokenizer, so tokenizer must not be given")
        if self.override_generation_config:
            names = ("max_new_tokens", *GENERATION_DEFAULTS)
            refuse_unknown("entry of override_generation_config", self.override_generation_config, names)

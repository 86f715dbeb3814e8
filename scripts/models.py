"""Writes docs/models.md of the families in quintet/models: what each has is read off a small model of it.

    python scripts/models.py

A family's first line is its file's, and what was shown of it is in the platforms' tables (`scripts/support.py`); a
rule in tests/rules holds all of them together. What no file says stands here: names of models that are built like
another's, and what is left out.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from transformers.models.auto import modeling_auto

from quintet.conformance.features import CLAIMS
from quintet.engine.platform_support import SUPPORT_FILE as TABLE
from quintet.engine.platform_support import Support, read
from quintet.hub.hf_config import read_config
from quintet.interface.platform import SingleRank
from quintet.interface.types import StateSpec
from quintet.layers import blocks
from quintet.layers.attention.attention import SelfAttention, SharedKVAttention
from quintet.layers.attention.relative_bias import RelativeAttention
from quintet.layers.build import BuildContext, RequestedOutputs
from quintet.layers.embedding import PositionEmbedding, SinusoidalPositionEmbedding
from quintet.layers.layer_state import LayerMixer
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary
from quintet.media.families import FAMILIES
from quintet.models import built_in, families, model_class
from quintet.ops import bind
from quintet.quantize.targets import UnusedMixer
from quintet_tools.checkpoints import encoders
from quintet_tools.checkpoints.custom_encoders import PUBLISHED_ENCODERS
from quintet_tools.checkpoints.custom_families import PUBLISHED, Published
from quintet_tools.checkpoints.encoder_decoders import ENCODER_DECODERS
from quintet_tools.checkpoints.encoders import ENCODERS
from quintet_tools.checkpoints.hyper_families import TEXTS
from quintet_tools.checkpoints.tiny import EVERY, configured
from scripts.reference_pages import media_wrappers
from scripts.reference_pages.gguf_table import gguf_table, published_table

ROOT = Path(__file__).parents[1]
FILE = Path("docs/models.md")

# model_type -> models that say so of themselves, beside those that the family's file names
ALSO = {
    "nemotron-nas": "Llama Nemotron Super 49B and Ultra 253B",
    "PanguEmbedded": "openPangu Embedded 1B and 7B",
    "TeleFLM": "Tele-FLM, FLM-2",
    "minicpm": "2B, MoE, MiniCPM 4; 4.1 up to its dense_len",
    "orion": "Orion 14B",
    "param2moe": "Param 2",
    "sarvam_mla": "Sarvam 105B",
    "sarvam_moe": "Sarvam 30B",
    "telechat3": "TeleChat 3, its dense sizes",
    "cwm": "CWM 32B",
    "deepseek_v32": "longer requests than index_topk tokens (2048 as published) on `cpu` alone",
    "deepseek_v4": "on `cpu` alone; published files are unverified",
    "axk2": "as DeepSeek-V3.2",
    "glm_moe_dsa": "GLM-5, as DeepSeek-V3.2",
    "falcon_mamba": "Falcon-Mamba (TII 2024)",
    "llama_bidirec": "Llama Nemotron Embed, whose tokens see both ways; for embeddings",
    "nomic_bert_moe": "Nomic Embed v2 (Nussbaum and Duderstadt 2025)",
    "deberta-v2": "v3, mxbai-rerank v1, Prompt Guard; not v2's xlarge files, which have a convolution",
    "falcon": "not Falcon 3, which is `llama`",
    "gpt_neox": "Dolly, StableLM Alpha, RedPajama-INCITE",
    "deepseek_v3": "R1, Moonlight",
    "bailing_hybrid": "not Ling 2.5, whose `config.json` has the same type",
    "bailing_moe": "Ling-lite and -plus, Ring-lite",
    "bailing_moe_v2": "Ling and Ring 2.0 (mini, flash, 1T)",
    "chatglm": "not ChatGLM-6B; GLM-4's `-hf` checkpoints are `glm`",
    "internlm": "InternLM 7B and 20B",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "internlm3": "InternLM 3 8B",
    "iquestcoder": "IQuest-Coder",
    "kimi_k2": "Kimi K2",
    "kimi_linear": "slow on GPUs, where its rule has no kernel yet",
    "llama": "Yi, SmolLM 2, TinyLlama, Vicuna, SOLAR 10.7B, DeepSeek LLM and Coder, Falcon 3",
    "minimax_m3_text": "MiniMax-M3's text by itself",
    "minimax_m3_vl_text": "requests of more tokens than the chosen blocks have (2048 as published) on `cpu` alone",
    "qwen3_5": "Qwen3.5, its text",
    "qwen3_5_moe": "Qwen3.5 with experts, its text",
    "qwen3_5_moe_text": "Qwen3.5 with experts, its text",
    "qwen3_5_text": "Qwen3.5, its text",
    "qwen4_exp": "its text",
    "qwen4_exp_text": "requests of more tokens than its indexers choose on `cpu` alone",
    "glm4v_text": "text of GLM-4.1V and GLM-4.6V-Flash",
    "glm5_next": "the type of its wrapper",
    "glm5_next_text": "text of GLM-5.3-Flash; longer requests than index_topk tokens on `cpu` alone",
    "hunyuan_vl_text": "text of HunyuanOCR",
    "hy_v4": "longer requests than index_topk tokens on `cpu` alone",
    "mistral_large4": "the type of its wrapper",
    "mistral_large4_text": "text of Mistral Large 4; longer requests than index_topk tokens on `cpu` alone",
    "glm4v_moe_text": "text of GLM-4.5V and GLM-4.6V",
    "glm_ocr_text": "text of GLM-OCR",
    "paddleocr_vl_text": "text of PaddleOCR-VL",
    "gte": "Snowflake Arctic Embed M v2.0",
    "jina_bert": "`config.json` says `bert`",
    "new": "GTE v1.5 and multilingual, as published",
    "xlm-roberta": "also Jina's reranker v2",
    "xlm-roberta-flash": "Jina Embeddings v3 as published, whose `config.json` says `xlm-roberta`",
    "minimax": "as transformers stores them (`-hf`), not under the types `minimax_text_01` and `minimax_m1`",
    "mistral": "Zephyr, Nemo, Devstral",
    "qwen2_5_omni_text": "text of Qwen2.5-Omni",
    "qwen2_5_vl_text": "text of Qwen2.5-VL",
    "qwen2_vl_text": "text of Qwen2-VL",
    "qwen3_omni_moe_text": "text of Qwen3-Omni",
    "qwen3_vl_moe_text": "text of Qwen3-VL with experts",
    "qwen3_vl_text": "text of Qwen3-VL",
    "blenderbot-small": "Blenderbot 90M",
    "mvp": "without prompts (`use_prompt`)",
    "m2m_100": "NLLB-200, its dense sizes",
    "marian": "Helsinki-NLP's OPUS-MT",
    "mbart": "mBART-50",
    "modernbert-decoder": "Ettin's decoders (Weller et al. 2025)",
    "moonshine": "tiny and base, in all languages; not the streaming models ([speech.md](speech.md#moonshine))",
    "whisper": "all sizes, `.en`; CTranslate2's folders and whisper.cpp's files, too ([speech.md](speech.md))",
    "qwen2": "QwQ, DeepSeek-R1-Distill-Qwen",
}
# what a report shows first of families that give hidden states alone
HIDDEN = "hidden states"
# wrappers of several modalities, whose text is read, and types of repositories' own code -> what transformers calls it
WRAPPED = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm5_next": "glm5_next_text",
    "mistral_large4": "mistral_large4_text",
    "glm_ocr_text": "glm4",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "paddleocr_vl_text": "ernie4_5",
    "kimi_k2": "deepseek_v3",
    "minimax_m3_text": "minimax_m3_vl_text",
    "deepseek_ocr2_text": "deepseek_v2",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "phi4_multimodal": "phi3",
    "llama4": "llama4_text",
    "llama_bidirec": "llama",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
# wrappers whose media are served -> which models those are
WITH_MEDIA = {
    "gemma3": "Gemma 3 from 4B on",
    "aya_vision": "Aya Vision",
    "blip-2": "BLIP-2 on OPT; one image, whose tokens stand before the text, without a placeholder",
    "video_llava": "Video-LLaVA",
    "clip": "CLIP: embeddings of texts and of images",
    "colpali": "ColPali: as ColQwen2",
    "paligemma": "PaliGemma and PaliGemma 2",
    "siglip": "SigLIP, and SigLIP 2 with fixed sizes: as CLIP",
    "siglip2": "SigLIP 2 with images of any shape (NaFlex): as CLIP",
    "colqwen2": "ColQwen2: vectors of each token, of pages and of queries, for late interaction",
    "cohere2_vision": "Command A Vision",
    "deepseek_vl": "DeepSeek-VL 1.3B",
    "deepseek_vl_hybrid": "DeepSeek-VL 7B, which has two towers",
    "exaone4_5": "EXAONE 4.5",
    "gemma4": "Gemma 4; sound: E2B and E4B, 30 s at most; tokens of an image of the larger ones see one another in "
    "windowed layers, and are computed in one step; these on the CPU alone",
    "gemma4_unified": "Gemma 4 12B, which has no towers; as the larger ones of `gemma4`",
    "glm46v": "GLM-4.6V-Flash",
    "glm4v": "GLM-4.1V",
    "glm4v_moe": "GLM-4.5V",
    "glm_ocr": "GLM-OCR",
    "got_ocr2": "GOT-OCR 2; one page an image",
    "hyperclovax_vision_v2": "HyperCLOVA X SEED Think with vision",
    "idefics2": "Idefics 2",
    "janus": "Janus, Janus-Pro: images in, and text out",
    "kimi_k25": "Kimi K2.5",
    "lfm2_vl": "LFM2-VL",
    "lighton_ocr": "LightOnOCR",
    "llama4": "Llama 4 Scout and Maverick",
    "llava_next_video": "LLaVA-NeXT-Video",
    "paddleocr_vl": "PaddleOCR-VL",
    "qianfan_ocr": "Qianfan-OCR",
    "video_llama_3": "VideoLLaMA 3",
    "vipllava": "ViP-LLaVA",
    "idefics3": "Idefics 3; an image is cut into tiles, with tokens between their rows",
    "internvl": "InternVL 2.5, 3 and 3.5 as transformers stores them (`-hf`)",
    "llava": "LLaVA 1.5, and Pixtral as transformers stores it",
    "llava_next": "LLaVA 1.6",
    "llava_onevision": "LLaVA-OneVision",
    "mistral3": "Mistral Small 3.1 and 3.2",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_vl": "Qwen2-VL",
    "qwen3_5": "Qwen3.5, dense",
    "qwen3_5_moe": "Qwen3.5 with experts",
    "qwen3_vl": "Qwen3-VL, dense",
    "qwen3_vl_moe": "Qwen3-VL with experts",
    "smolvlm": "SmolVLM, SmolVLM 2",
    "deepseek_ocr2": "DeepSeek-OCR 2",
    "glmasr": "GLM-ASR; one recording in a prompt",
    "glmga": "GLM-GA",
    "granite4_vision": "Granite Vision 4",
    "granite_docling": "Granite Docling, as transformers 5.23 has it; the coarse path of its connector",
    "lfm3_vl": "LFM3-VL",
    "minicpm_ocr": "MiniCPM-OCR",
    "minicpmv4_6": "MiniCPM-V 4.6",
    "minimax_m3_vl": "MiniMax-M3; frames of videos stay as they are, and sides are multiples of two patches, unless "
    'mm_processor_kwargs has `{"do_resize": true}`',
    "minicpmv4_7": "MiniCPM-V 4.7",
    "moss_transcribe_diarize": "MOSS-Transcribe-Diarize",
    "nemotron_h_omni": "Nemotron 3 Nano Omni",
    "phi4_multimodal": "Phi-4-multimodal as transformers stores it; its LoRA adapters are requests'",
    "qwen2_5_omni": "Qwen2.5-Omni: its thinker; the tensors that speak are passed over",
    "qwen2_5_omni_thinker": "the thinker of Qwen2.5-Omni by itself",
    "qwen3_asr": "Qwen3-ASR; one recording in a prompt",
    "qwen3_omni_moe": "Qwen3-Omni: its thinker; the tensors that speak are passed over",
    "qwen3_omni_moe_thinker": "the thinker of Qwen3-Omni by itself",
    "vibevoice_asr": "VibeVoice ASR",
    "qwen2_audio": "Qwen2-Audio; 30 s at most, what is longer is refused",
    "voxtral": "Voxtral Mini and Small, as transformers stores them",
}
# what was asked for -> why it is not there
LEFT_OUT = {
    "T5, mT5 and UMT5 (`t5`)": (
        "their decoders add a learned bias by distance to the scores of attention, which attention over pages does not "
        "compute ([encoder-decoders](encoder-decoders.md))"
    ),
    "DiffLlama (`diffllama`)": "its attention is the difference of two, which no platform's attention computes",
    "BitNet (`bitnet`)": "its weights are of three values, packed in a form that no product here takes",
}


def tables() -> dict[str, Support]:
    """Platform -> what its report says, for those that have one."""
    found = sorted((ROOT / "quintet" / "platforms").rglob(TABLE))
    return {each.platform: each for each in map(read, found)}


def page() -> str:
    """docs/models.md."""
    known = tables()
    names = [f"`{name}`{', emulated' * each.emulated}" for name, each in known.items()]
    head = f"| {' | '.join((*COLUMNS, *names))} |\n{'|---' * (len(COLUMNS) + len(names))}|\n"
    rows = [_row(kind, known) for kind in families()]
    left = [f"- {what}: {why}." for what, why in sorted(LEFT_OUT.items())]
    shown = "\n".join(rows) + f"\n\n{gguf_table()}\n{published_table()}" + MIDDLE + _media()
    return HEAD + head + shown + AFTER_MEDIA + "\n".join(left) + "\n" + END


def _media() -> str:
    """Rows of the table of wrappers whose media are served."""
    rows = []
    for kind, family in FAMILIES.items():
        parts = [WITH_MEDIA[kind]]
        parts += ["tokens have three rotary positions (M-RoPE)"] * family.rotary
        parts += [
            "tokens of an image see one another, and are computed in one step; on the CPU alone"
        ] * family.bidirectional
        parts += ["rows are added behind the first layers, too (deepstack)"] * family.deepstack
        rows.append(f"| `{kind}` | {', '.join(family.kinds)} | {'; '.join(parts)} |\n")
    return "".join(rows)


def _row(kind: str, known: dict[str, Support]) -> str:
    name, what = _first_line(kind)
    shown = [_shown(kind, each) for each in known.values()]
    cells = [f"`{kind}`", _names(kind, name), _classes(kind), _said(what, facts(_config(kind))), *shown]
    return f"| {' | '.join(cells)} |"


def _shown(kind: str, table: Support) -> str:
    """What a platform's report proves of the family, all of it or by name."""
    kind = WRAPPED.get(kind, kind)
    if f"family/{kind}" in table.unsupported:
        return "unsupported"
    claims = {**CLAIMS, "family": HIDDEN} if kind in ENCODERS else CLAIMS
    found = [what for group, what in claims.items() if f"{group}/{kind}" in table.supported]
    return ", ".join(found) if found else "unverified"


def _names(kind: str, name: str) -> str:
    also = ALSO.get(kind)
    if built_in(kind) != kind:
        return f"{also} (built as `{built_in(kind)}`)" if also else f"built as `{built_in(kind)}`"
    return f"{name}; {also}" if also else name


def _said(what: str, has: list[str]) -> str:
    return f"{what[0].upper()}{what[1:]} ({', '.join(has)})" if has else what


def _first_line(kind: str) -> tuple[str, str]:
    """The name with its source, and what it is, of the docstring of the family's file."""
    text = (ROOT / "quintet" / "models" / f"{built_in(kind)}.py").read_text(encoding="utf-8")
    line = text.split('"""')[1].splitlines()[0].removesuffix(".")
    name, found, what = line.partition(": ")
    if not found:
        return line, "llama's blocks" if built_in(kind) == "llama" else line
    return name, what


def _config(kind: str) -> Any:
    """Of the family's first small model."""
    if kind in ENCODER_DECODERS:
        return read_config(kind, ENCODER_DECODERS[kind], ROOT / "config.json")
    if kind in ENCODERS:
        return encoders.configured(kind, next(iter(ENCODERS[kind].values())))
    kind = WRAPPED.get(kind, kind)
    if kind not in EVERY:
        raise ValueError(f"{kind} has no line in tools/quintet_tools/checkpoints/{{tiny,derived_families,encoders}}.py")
    return configured(kind, next(iter(EVERY[kind].values())))


def _classes(kind: str) -> str:
    if kind in PUBLISHED_ENCODERS:
        return _nearest(PUBLISHED_ENCODERS[kind], modeling_auto.MODEL_MAPPING_NAMES, "custom_encoders.py")
    if (text := WRAPPED.get(kind, kind)) in TEXTS:
        return f"`{TEXTS[text]}`"
    if kind in PUBLISHED:
        return _nearest(PUBLISHED[kind], modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "reference_recurrent.py")
    if kind in ENCODER_DECODERS:
        texts, speech = (
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        )
        return f"`{texts.get(kind) or speech[kind]}`"
    causal, trunks = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES
    if kind in ENCODERS and kind not in trunks:  # SigLIP's text towers, which no table of transformers has
        return f"`{type(_config(kind)).__name__.removesuffix('Config')}Model`"
    found = trunks[kind] if kind in ENCODERS else causal.get(kind) or causal[WRAPPED[kind]]
    return f"`{found}`" if isinstance(found, str) else ", ".join(f"`{each}`" for each in found)


def _nearest(own: Published, classes: Mapping[str, Any], file: str) -> str:
    """What a family that transformers has no class for is compared with; `file`: where formulas are written down."""
    if own.own is not None:
        formulas = f"the published formulas, written down by themselves (`tools/quintet_tools/checkpoints/{file}`)"
        return f"none; {own.words or formulas}"
    return f"none; the nearest is `{classes[own.like]}`{', ' * bool(own.words)}{own.words}"


def facts(config: Any) -> list[str]:
    """What a model of this config has that another may lack."""
    specs: list[Any] = []

    def mixing(spec: Any) -> LayerMixer:
        specs.append(spec)
        return LayerMixer(UnusedMixer())

    hidden = config.model_type in ENCODERS
    wanted = RequestedOutputs(logits=not hidden, hidden_states=hidden)
    build = BuildContext(
        bind({}), mixing, SingleRank(), torch.float32, page_size=16, max_model_len=64, requested_outputs=wanted
    )
    model = model_class(config)(config, build)
    parts = list(model.modules())
    return [*_attention(specs), *_positions(parts, specs), *_layers(parts)]


def _attention(specs: list[Any]) -> list[str]:
    windows = [getattr(spec, "window", None) for spec in specs]
    found = [] if not any(windows) else ["windows" if all(windows) else "windows in some layers"]
    names = {"softcap": "soft-capped scores", "sinks": "sinks", "alibi": "ALiBi", "shared": "latent attention"}
    names |= {"chunk": "chunks in some layers", "rate": "compressed entries"}
    if any(getattr(spec, "rate", None) is not None for spec in specs):  # their V is K, and no latent
        del names["shared"]
    found += [name for field, name in names.items() if any(getattr(spec, field, None) for spec in specs)]
    found += ["a state per request"] if any(isinstance(spec, StateSpec) for spec in specs) else []
    found += ["attention to an encoder's rows"] if any(getattr(spec, "source", "") == "cross" for spec in specs) else []
    specs = [spec for spec in specs if getattr(spec, "source", "") != "cross"]
    return found + (["both ways"] if any(getattr(spec, "causal", True) is False for spec in specs) else [])


def _positions(parts: list[nn.Module], specs: list[Any]) -> list[str]:
    attends = [part for part in parts if isinstance(part, SelfAttention)]
    rotaries = [part for part in parts if isinstance(part, Rotary)]
    tables = [part for part in parts if isinstance(part, PositionEmbedding)]
    found = [
        "sinusoids" if isinstance(each, SinusoidalPositionEmbedding) else "learned positions" for each in tables[:1]
    ]
    if any(rotary.interleaved for rotary in rotaries):
        found.append("neighbours turned")
    if any(rotary.dim < attend._head_dim for attend in attends if (rotary := attend.rotary) is not None):
        found.append("part of each head turned")
    if rotaries and any(attend.rotary is None for attend in attends):
        found.append("no positions in some layers")
    if any(isinstance(part, SharedKVAttention) for part in parts):
        found.append("layers that read another's cache")
    if any(isinstance(part, RelativeAttention) for part in parts):
        found.append("a number for each distance")
    return found + (["QK-norm"] if any(attend.q_norm is not None for attend in attends) else [])


def _layers(parts: list[nn.Module]) -> list[str]:
    kinds = {type(part).__name__ for part in parts}
    found = ["parallel blocks"] if any(isinstance(part, blocks.ParallelBlock) for part in parts) else []
    found += ["experts"] if kinds & {"Experts", "BiasedExperts", "UngatedExperts"} else []
    return found + (["LayerNorm"] if any(isinstance(part, LayerNorm) for part in parts) else [])


COLUMNS = ("`model_type`", "models", "transformers' class", "what it is")
HEAD = """# Models

Which families run, what each has, and what its numbers are compared with. Written by `scripts/models.py` of the
files in `quintet/models`; do not edit it.

A checkpoint's `config.json` names its family (`model_type`); transformers reads the file, our modules compute. What
a config may say and a family does not compute is refused by name.

Every family is made small with random weights, by transformers' own class where it has one, which is the reference.
The last columns say what each platform's report (`quintet conformance`, [support.md](support.md)) shows of it; nothing
there is written by hand:

- *logits*: within tolerance of transformers' in float32 (or the platform's best), for prompts in one piece, in chunks
  and beside each other.
- *hidden states*: the same of encoders, for texts beside each other.
- *tokens*: what is drawn, greedily and otherwise, is what transformers' logits give.
- *bfloat16*: no further from float32 than transformers is in the same type.
- *bits*: alone, batched, chunked, found in the prefix cache and preempted, a request's tokens and their
  log-probabilities are the same to the last bit; of encoders, a text's hidden states alone and beside others.

`tests/e2e/families/test_families.py` tries more configurations of each. No published checkpoint of these families was
run here, unless [performance.md](performance.md) names it.

Some families transformers has no class for ("none"): their checkpoints bring Python of their own (`auto_map`), and
load here without it and without `--trust-remote-code`; `quintet/hub/legacy_configs.py` reads their config.json.
Their reference is transformers' nearest class, whose tensors are renamed and fused as the published files have them,
and whose modules are put together otherwise where the row says so (`custom_families.py` and, of encoders,
`custom_encoders.py` in `tools/quintet_tools/checkpoints`); where no class is near, the published formulas are written
down by themselves. The published Python was not run. Tokenizers that are Python do not load: such a model needs a
tokenizer.json (`--tokenizer`).

"""
MIDDLE = """

## Computed otherwise

- `mamba`, `mamba2`, `falcon_mamba`, `nemotron_h`: checkpoints may ask for the sums of the layers' outputs in float32
  (`residual_in_fp32`). Here they have the model's type, which a warning says at start; `--dtype float32` keeps them.

## Text of multimodal models

The text of a multimodal model runs as its text model: the type in its config's `text_config` chooses the family, and
the tensors of other parts (towers and projectors of wrappers that are not in the table of media below) are passed
over, which a line at start says. Where no family here has the type, transformers' code may run it.
`tests/reports/checkpoints/test_text_of_multimodal_checkpoints.py` compares tokens with transformers' wrappers:
`mistral3` (Mistral Small 3.x, Ministral 3), `llava`, `llava_next`, `idefics3`, `smolvlm`, `internvl`, `aya_vision`,
`exaone4_5`, `hyperclovax_vision_v2`, `lighton_ocr`, `minicpmv4_6`, `minicpmv4_7`, `qwen2_vl`, `qwen2_5_vl`,
`qwen3_vl`, `gemma3`, `gemma4`, `kimi_k25`, `voxtral` and `qwen2_audio`. The text of `paligemma` runs with its media
alone.

## Media of multimodal models

Of the wrappers in this table, images, videos or recordings are served, too. The processor, the towers and the
projectors are transformers' own; the text model is the family's file here. `tests/e2e/media` compares greedy tokens in
float32 with transformers' wrapper on the CPU, for small random checkpoints: no item, one, several, odd sizes, the same
one twice, videos beside images; alone, batched, cut at any token, found in the prefix cache, preempted. No published
checkpoint was run here, and no GPU: the towers compute by torch there, too, which is unverified.

| `model_type` | takes | what it is |
|---|---|---|
"""
AFTER_MEDIA = """
- Others are refused by name, and their text runs. All wrappers of transformers, and why:
  [media-wrappers.md](media-wrappers.md). Ultravox has no class in transformers, and does not load.
- Refused, too, with a reason at start: on platforms whose device is reached by ops alone (TPU), with a draft model or
  head, in a GGUF file, with `load_format` `sharded_state`, and Qwen3-VL in pipeline stages.
- Memory: rows of media stand on the device, `hidden_size` numbers of the model's type for each token of an item
  (Qwen3-VL: several times as many), until their place is needed. `encoder_cache_rows` sets how many there is room
  for; by default `max_num_batched_tokens`, 8192, or twice `max_model_len` where that is less than 8192, whichever is
  most. They, and the towers, are counted among the weights. An item with more tokens than rows is refused when its
  request comes; requests whose media find no room wait.
- `limit_mm_per_prompt` with 0 for each kind of a model loads no tower, and `language_model_only` does the same.
- Without torchvision, images are processed by Pillow and NumPy (transformers' `backend="pil"`), whose pixels differ in
  the last bits from torchvision's. Where it is installed, transformers chooses. Videos: [images.md](images.md#videos).
- An item is processed alone, and found again by its content (`mm_processor_cache_gb`). LLaVA-OneVision's chats with
  several images are read as transformers' `apply_chat_template` has them: each as one tile.

## Left out

What has no file here and transformers has code for may run through that:
[transformers-backend.md](transformers-backend.md). `quintet try MODEL` ([the command line](cli.md)) compares a small
random copy of an architecture with transformers; [tried-models.md](reference/tried-models.md) has the results of all
causal model types of transformers.

"""
END = """
## Add a family

1. Read transformers' `models/<name>/modular_<name>.py`: it says what differs from a family that may be here already.
   Compare its free functions too (nanochat's `rotate_half` turns the other way round). `configuration_<name>.py` has
   the entries: each is used, or refused by `refuse(config, "flag")` where it changes what is computed. Published files
   have more, which transformers may pass over: `require(config, entries)` says what is computed of them. Tensors that a
   published checkpoint calls otherwise than the classes do stand in transformers' `conversion_mapping.py`.
2. If nothing differs, a line in `_ALIASES` of `quintet/models/__init__.py` is the code; go on with 5.
3. Write `quintet/models/<model_type>.py`: one class derived from `CausalLM`, called with `(config, build)` and named as
   `architectures` of config.json has it. Start from what the list below names. Modules have the checkpoint's names;
   where blocks take parts in a dict, its keys are these names, and `renamed_tensors` what does not fit. The file's
   first line is the family's name with its source, a colon, and what it is: this page shows it.
4. New mathematics is an op: its specification in `quintet/ops`, cases in `quintet/conformance/cases/model_ops.py`, and
   providers where they pay. Platforms without one run the specification.
5. If transformers has no class for it: how its config.json is read, in `quintet/hub/legacy_configs.py`, and what it
   is compared with, in `tools/quintet_tools/checkpoints/custom_families.py` (of an encoder, in `custom_encoders.py`).
6. A line in `tools/quintet_tools/checkpoints/derived_families.py` (of an encoder, in `encoders.py`): one or two small
   configs that between them use every branch of your file.
   `kin_configs()` of `tests/helpers/checkpoints/configs.py` tries them with other numbers of heads and features. A
   family with a layer or an op that no other has stands in `tiny.py` there and `_OWN` of `configs.py` instead.
7. In `tests/e2e/families/test_families.py`: what you refuse, in `test_what_is_not_computed_is_refused`; and if
   `forward()` calls torch where others call an op, the family's name above
   `test_bits_are_the_same_alone_batched_and_chunked`.
8. In `scripts/models.py`: other names of the models in `ALSO`, a wrapper whose text is read in `WRAPPED`, and its line
   out of `LEFT_OUT`. In `CHANGELOG.md`: the family.
9. Compare, and write this page anew:

```
python -m pytest tests/e2e/families/test_families.py -k <model_type>
quintet conformance --device cpu --json conformance/reports/cpu.json
python scripts/support.py && python scripts/models.py
```

What a family may have, and where it is (`quintet/models/`, unless another folder is named):

- Llama with another part: override the hook of `LlamaForCausalLM` that builds it. `_attention_sizes` (biases, windows,
  checkpoint layout) as in `mistral.py`, `_rotary` as in `helium.py`, `_attention` as in `qwen3.py`, `_mlp` as in
  `arcee.py`, `_block` and `_trunk` as in `granite.py`.
- A parameter of your own: a `Layer` whose `weights(path)` returns its weights, such as one with one axis:
  `vector_weight(build, f"{path}.shift", width)` of `quintet/layers/build.py`. The second argument is the tensor's name
  in the checkpoint, and its last part the attribute's name (`examples/model-family/stranger/model.py` gives another by
  `name=`). Products are `column_parallel`, `row_parallel` and
  `LMHead` of `quintet/layers/linear.py`.
- Other names, another order of norms: `SerialBlock`, `ParallelBlock`, `PostNormBlock`, `BetweenNormsBlock` of
  `quintet/layers/blocks.py`, as in `apertus.py`, `cohere2.py`, `exaone4.py`, `afmoe.py`.
- Something behind the embedding, a last norm that is not Llama's: `Trunk`, as in `bloom.py`, `olmo.py`, `nanochat.py`.
- Norms without weights: `RMSNorm(..., weighed=False)`, `LayerNorm(..., parts=())`; kept around 0: `offset=1.0`.
- Q and k normalised: each head (`qwen3.py`), once it is turned (`hunyuan_v1_dense.py`), all together (`minimax_m2.py`).
- Positions: neighbours turned (`helium.py`), a part of each head (`glm4_moe.py`), others in windows (`gemma3.py`), none
  in some layers (`smollm3.py`), learned (`opt.py`).
- Windows, sinks, capped scores, ALiBi, another scale: fields of `AttentionSizes`, and `layer_window(config, index)`.
- A gate on what attention gives: `afmoe.py`; beside each query: `qwen3_next.py`; of each head: `lfm3.py`.
- Latent attention: `deepseek_v3.py`, `minicpm3.py`. Attention to what an indexer chooses: tokens (`deepseek_v32.py`),
  blocks (`minimax_m3_vl_text.py`, `qwen4_exp_text.py`).
- Experts: `MoESizes` of `quintet/layers/moe/moe.py` has the routers, as in `qwen3_moe.py` (softmax), `glm4_moe.py`
  (sigmoid), `cohere2_moe.py` (either).
- A state instead of a cache: `lfm2.py`, `mamba2.py`, `bamba.py`, `qwen3_next.py`, `kimi_linear.py`.
- Embeddings of each layer's own, layers that read another's KV cache, other heads in some layers: `gemma4.py`.
- Multipliers: `granite.py`. Capped logits: `gemma2.py`.
- Several products in one tensor, weights stored [in, out]: `CheckpointLayout` of `layers/linear.py`, as in `glm.py`,
  `gpt2.py`, `codegen.py`.
- The text model of a wrapper: its type, in `_ALIASES`; `model_loader/text_names.py` maps the names of all.

A package can bring a family without touching this repository: an entry point in the group `quintet.models`, or
`quintet.models.register()` ([loading](loading.md#models-of-installed-packages)). The model class's `config_class` reads
its config, and `quintet conformance` compares it with the `reference_class`.
[examples/model-family](../examples/model-family/README.md) is one, whole.
"""

if __name__ == "__main__":
    (ROOT / FILE).write_text(page(), encoding="utf-8")
    (ROOT / media_wrappers.FILE).write_text(media_wrappers.page(), encoding="utf-8")
    print(FILE, media_wrappers.FILE)

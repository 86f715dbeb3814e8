"""Text of multimodal checkpoints: a wrapper's text model gives the wrapper's own tokens (claim 2 and 4).

The wrappers are transformers' own classes with small random weights, saved by save_pretrained().
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

import quintet
from quintet import LLM, SamplingParams
from quintet.api.explain import explain
from quintet.chat.messages import ChatOptions, render_chat
from quintet.config import EngineConfig
from quintet.hub.resolve import load_generation_config
from quintet.model_loader.mistral_format import config_of
from quintet.model_loader.text_names import text_names
from quintet.tokenizers.tokenizer import load_tokenizer
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.tiny import hushed, variant
from tests.helpers.platforms.engines import answers, engine

BUNDLED_FOLDER = Path(quintet.__file__).parent / "bundled"
VOCAB, LENGTH, GENERATED = 200, 64, 8
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, **IDS,
}  # fmt: skip
HEADS = {"head_dim": 16}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], **HEADS,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# wrapper's model_type -> its text model's, and what that has beside TEXT
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("mistral", HEADS),
    "llava": ("llama", {}),
    "llava_next": ("mistral", HEADS),
    "idefics3": ("llama", {}),
    "smolvlm": ("llama", {}),
    "internvl": ("qwen2", {}),
    "aya_vision": ("cohere2", {**HEADS, **WINDOWS, "logit_scale": 1.0}),
    "exaone4_5": ("exaone4", WINDOWS),
    "hunyuan_vl": ("hunyuan_vl_text", {**HEADS, "rope_parameters": {  # as HunyuanOCR has them
        "rope_type": "xdrope", "rope_theta": 1e4, "alpha": 1e3, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}}),
    "hyperclovax_vision_v2": ("hyperclovax", HEADS),
    "lighton_ocr": ("qwen3", HEADS),
    "minicpmv4_6": ("qwen3_5_text", DELTA),
    "minicpmv4_7": ("qwen3_5_text", DELTA),
    "qwen2_vl": ("qwen2_vl_text", SECTIONS),
    "qwen2_5_vl": ("qwen2_5_vl_text", SECTIONS),
    "qwen3_vl": ("qwen3_vl_text", {**SECTIONS, **HEADS, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", {**HEADS, **WINDOWS}),
    "gemma4": ("gemma4_text", {**HEADS, **WINDOWS, "global_head_dim": 16, "num_kv_shared_layers": 0,
                               "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}),
    "kimi_k25": ("deepseek_v3", LATENT),
    "voxtral": ("llama", HEADS),
    "qwen2_audio": ("qwen2", {}),
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_heads": 2,
    "depth": 1, "embed_dim": 32, "encoder_layers": 1, "encoder_ffn_dim": 48, "encoder_attention_heads": 2,
    "d_model": 32, "head_dim": 16,
}  # fmt: skip
CLASSES = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)


def wrapper(kind: str, folder: Path, **entries: Any) -> Any:
    """Saves a small wrapper, and returns transformers' model."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    text, more = WRAPPERS[kind]
    made = CONFIG_MAPPING[kind]().to_dict()
    towers = {
        name: {**part, **{key: size for key, size in TOWER.items() if key in part}}
        for name, part in made.items()
        if isinstance(part, dict) and name.endswith("_config") and name != "text_config"
    }
    special = {name: VOCAB - 1 for name in made if name.endswith(("token_id", "token_index"))}
    parts = {**towers, "text_config": {"model_type": text, **TEXT, **more}}
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**{**special, **IDS, **parts, **entries})
        names = next(names[kind] for names in CLASSES if kind in names)
        model = getattr(transformers, names if isinstance(names, str) else names[0])(config).float().eval()
        scatter(model)
        model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(GENERATED):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generated(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    llm = LLM(str(folder), dtype="float32", max_model_len=LENGTH, skip_tokenizer_init=True, **settings)
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


PROMPTS = [[5, 9, 31, 77, 120, 4, 18, 66, 91, 13, 25], [150, 3]]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrappers_text_gives_the_wrappers_tokens(kind: str, tmp_path: Path) -> None:
    model = wrapper(kind, tmp_path)
    assert generated(tmp_path, PROMPTS) == [greedy(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_names_of_either_layout_are_read_with_the_towers_in_a_file_of_their_own(
    prefix: str, tied: bool, tmp_path: Path
) -> None:
    model = wrapper("mistral3", tmp_path, tie_word_embeddings=tied)
    tensors = load_file(tmp_path / "model.safetensors")
    text, rest = {}, {}
    for name, tensor in tensors.items():
        own = re.sub(r"^(language_model\.model|model\.language_model)\.", prefix, name)
        own = re.sub(r"^(language_model\.)?lm_head", f"{prefix.removesuffix('model.language_model.')}lm_head", own)
        own = own.replace("language_model.model.lm_head", "language_model.lm_head")
        (text if "language_model" in own or "lm_head" in own else rest)[own] = tensor
    assert rest and len(text) == 2 + 9 * 2 + (not tied)
    (tmp_path / "model.safetensors").unlink()
    save_file(text, tmp_path / "model-00001-of-00002.safetensors")
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    assert generated(tmp_path, PROMPTS) == [greedy(model, prompt) for prompt in PROMPTS]


def test_towers_are_named_among_the_decisions(tmp_path: Path) -> None:
    wrapper("llava", tmp_path)
    settings = {"max_model_len": LENGTH, "skip_tokenizer_init": True, "limit_mm_per_prompt": {"image": 0}}
    decisions = explain(EngineConfig(str(tmp_path), device="cpu", **settings))
    line = next(line for line in str(decisions).splitlines() if "multimodal" in line)
    assert "runs as llama; images, video and audio are not served for this model of type llava: limit_mm_per" in line
    assert re.search(r"passed over: vision_tower \(\d+\), multi_modal_projector \(4\)", line)


@pytest.mark.parametrize("settings", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}])
def test_vllms_settings_for_text_alone_change_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    wrapper("qwen2_5_vl", tmp_path)
    assert generated(tmp_path, PROMPTS[:1], **settings) == generated(tmp_path, PROMPTS[:1])


def test_a_flat_config_is_read_as_published(tmp_path: Path) -> None:
    """Qwen2.5-VL's config.json has the text model's entries beside vision_config."""
    model = wrapper("qwen2_5_vl", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    text.pop("model_type")
    (tmp_path / "config.json").write_text(json.dumps({**text, **raw}))
    tensors = load_file(tmp_path / "model.safetensors")
    flat = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
            for name, tensor in tensors.items()}  # fmt: skip
    assert any(name.startswith("visual.") for name in flat)
    save_file(flat, tmp_path / "model.safetensors")
    assert generated(tmp_path, PROMPTS) == [greedy(model, prompt) for prompt in PROMPTS]


def test_a_wrapper_that_transformers_has_no_class_for_runs_by_its_text_config(tmp_path: Path) -> None:
    """As OpenGVLab's internvl_chat, with llm_config; none of its code (auto_map) runs."""
    tiny = variant("qwen2", "plain")
    tensors = load_file(tiny.folder / "model.safetensors")
    inner = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**inner, "vision_model.x": torch.ones(2), "mlp1.0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    text = json.loads((tiny.folder / "config.json").read_text())
    raw = {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "llm_config": text,
           "auto_map": {"AutoModel": "x.InternVLChatModel"}, "vision_config": {"depth": 3}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    settings = {"load_format": "auto"}
    assert answers(engine(type(tiny)(tmp_path, tiny.config, tiny.reference), **settings), 6) == answers(engine(tiny), 6)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("thinker.model.language_model.norm.weight", "model.norm.weight"),
        ("llm.model.layers.1.x", "model.layers.1.x"),
        ("language_model.backbone.layers.1.norm.weight", "backbone.layers.1.norm.weight"),
        ("model.vision_tower.layers.0.norm.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("image_newline", None),
    ],
)
def test_a_tensors_name_in_the_text_model(name: str, own: str | None) -> None:
    assert text_names([name, "model.language_model.norm.weight"])(name) == own


PARTS = (  # as LLaVA's, which renders parts alone
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{% endfor %}"
)


def test_a_template_of_parts_alone_gets_a_texts_words() -> None:
    tokenizer = load_tokenizer(BUNDLED_FOLDER)
    options = ChatOptions(chat_template=PARTS)
    for content in ("Hello", [{"type": "text", "text": "Hello"}]):
        assert render_chat(tokenizer, [{"role": "user", "content": content}], options).text == "user: Hello"


def test_a_processors_template_is_the_tokenizers(tmp_path: Path) -> None:
    """chat_template.json, as multimodal models had it before transformers 5."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_FOLDER / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    assert load_tokenizer(tmp_path).chat_template == PARTS


def test_an_image_is_refused_with_the_reason() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\] is of the kind image, which is not served"):
        render_chat(load_tokenizer(BUNDLED_FOLDER), messages, ChatOptions())


def test_the_end_of_a_text_is_read_of_the_text_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {"eos_token_id": [7, 8]}}))
    assert load_generation_config(tmp_path)["eos_token_id"] == [7, 8]


def test_mistrals_own_format_with_a_vision_encoder(tmp_path: Path) -> None:
    """Ministral 3's params.json (claim 4)."""
    params = {
        "dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
        "vocab_size": VOCAB, "rope_theta": 1e6, "max_position_embeddings": 262144, "tied_embeddings": True,
        "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1},
        "yarn": {"original_max_position_embeddings": 16384, "factor": 16, "apply_scale": False, "beta": 32, "alpha": 1},
        "vision_encoder": {"hidden_size": 32, "image_token_id": 10},
    }  # fmt: skip
    (tmp_path / "params.json").write_text(json.dumps(params))
    config = config_of(tmp_path / "params.json")
    assert config["model_type"] == "ministral3" and config["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING["ministral3"](**config)).float().eval()
        scatter(model)
    back = {"embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "mlp": "feed_forward",
            "post_attention_layernorm": "ffn_norm", "self_attn": "attention", "gate_proj": "w1", "down_proj": "w2",
            "up_proj": "w3", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}  # fmt: skip
    tensors = {"vision_encoder.ln_pre.weight": torch.ones(2), "vision_language_adapter.w_in.weight": torch.ones(2)}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if ".q_proj." in name or ".k_proj." in name:
            weight = weight.view(-1, 2, 8, 64).transpose(1, 2).reshape(weight.shape)
        parts = [back.get(part, part) for part in name.removeprefix("model.").split(".")]
        tensors[".".join(parts)] = weight.contiguous()
    save_file(tensors, tmp_path / "consolidated.safetensors")
    assert generated(tmp_path, PROMPTS) == [greedy(model, prompt) for prompt in PROMPTS]

"""Encoders in the layouts that their repositories have: Jina v2 and v3, GTE's `new`, and Jina's reranker v2.

Their code is not here. What it computes is written down below, or is transformers' own model under other names.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional

from quintet import LLM, PoolingParams
from quintet_tools.checkpoints.encoders import ENCODERS, encoder, hidden

TEXTS = [[5, 6, 7], [4] * 40, [9], list(range(5, 63)), [3, 70, 2]]
SIZES: dict[str, Any] = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
                         "intermediate_size": 72, "max_position_embeddings": 72, "layer_norm_eps": 1e-12,
                         "hidden_act": "gelu"}  # fmt: skip
Tensors = dict[str, torch.Tensor]
EACH = PoolingParams(task="token_embed", normalize=False)


def written(folder: Path, tensors: Tensors, **config: Any) -> Path:
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "skip_tokenizer_init": True, "use_tqdm": False, **settings})


def assert_alike(folder: Path, wanted: Any, **settings: Any) -> None:
    """Each token's hidden states are `wanted(ids)`, with the same bits alone; in bfloat16 the mean is near."""
    with opened(folder, **settings) as llm, torch.no_grad():
        together = [each.outputs.data for each in llm.encode(TEXTS, EACH, use_tqdm=False)]
        for ids, states in zip(TEXTS, together, strict=True):
            exact = wanted(ids).numpy()
            np.testing.assert_allclose(states, exact, atol=3e-5 * max(1, np.abs(exact).max()))
            assert np.array_equal(llm.encode([ids], EACH, use_tqdm=False)[0].outputs.data, states)
    settings["pooler_config"] = {"pooling_type": "MEAN"}
    with opened(folder, dtype="bfloat16", **settings) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            mean = wanted(ids).mean(0).numpy()
            assert output.outputs.data @ mean / np.linalg.norm(mean) >= 0.999


def normed(x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)


def times(x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


# ------------------------------------------------------------------------------------------------------------ Jina v2
# Of six heads: the powers of 2 ** -2 for four, and the first and third of those of 2 ** -1 for two more.
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])


def jina_v2(later: bool) -> Tensors:
    torch.manual_seed(0)
    hidden, inner, tensors = 48, 72, {}

    def product(name: str, outputs: int, inputs: int, bias: bool = True) -> None:
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs) * 0.15
        if bias:
            tensors[f"{name}.bias"] = torch.randn(outputs) * 0.1

    def norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = 1 + torch.randn(hidden) * 0.1, torch.randn(hidden) * 0.1

    product("embeddings.word_embeddings", 101, hidden, False)
    product("embeddings.token_type_embeddings", 2, hidden, False)
    norm("embeddings.LayerNorm")
    for index in range(2):
        layer = f"encoder.layer.{index}"
        for each in ("query", "key", "value"):
            product(f"{layer}.attention.self.{each}", hidden, hidden)
        product(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        product(f"{layer}.mlp.{'up_gated_layer' if later else 'gated_layers'}", 2 * inner, hidden, False)
        product(f"{layer}.mlp.{'down_layer' if later else 'wo'}", hidden, inner)
        names = ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2")
        for each in names if later else ("mlp.layernorm",):
            norm(f"{layer}.{each}")
    product("pooler.dense", hidden, hidden)
    return tensors


def jina_v2_states(tensors: Tensors, ids: list[int], later: bool) -> torch.Tensor:
    """Attention by its definition, slopes both ways, and a gate that is the first half or the second."""
    places = torch.arange(len(ids))
    slopes = -SLOPES[:, None, None] * (places[None, :] - places[:, None]).abs()
    x = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = normed(x, tensors, "embeddings.LayerNorm")
    for index in range(2):
        layer = f"encoder.layer.{index}"
        q, k, v = (times(x, tensors, f"{layer}.attention.self.{each}") for each in ("query", "key", "value"))
        if later:
            q = normed(q, tensors, f"{layer}.attention.self.layer_norm_q")
            k = normed(k, tensors, f"{layer}.attention.self.layer_norm_k")
        q, k, v = (each.reshape(len(ids), 6, 8).transpose(0, 1) for each in (q, k, v))
        weights = (q @ k.transpose(1, 2) / 8**0.5 + slopes).softmax(-1)
        mixed = times((weights @ v).transpose(0, 1).reshape(len(ids), 48), tensors, f"{layer}.attention.output.dense")
        y = normed(mixed + x, tensors, f"{layer}.attention.output.LayerNorm")
        if later:
            y = normed(x + y, tensors, f"{layer}.layer_norm_1")
            up, gate = times(y, tensors, f"{layer}.mlp.up_gated_layer").chunk(2, -1)
            out = times(up * functional.gelu(gate), tensors, f"{layer}.mlp.down_layer")
            x = normed(y + out, tensors, f"{layer}.layer_norm_2")
        else:
            gate, up = times(y, tensors, f"{layer}.mlp.gated_layers").chunk(2, -1)
            out = times(functional.gelu(gate) * up, tensors, f"{layer}.mlp.wo")
            x = normed(out + y, tensors, f"{layer}.mlp.layernorm")
    return x


JINA_V2 = {**SIZES, "model_type": "bert", "architectures": ["JinaBertForMaskedLM"], "type_vocab_size": 2,
           "position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean"}  # fmt: skip


@pytest.mark.parametrize("later", [False, True])
def test_jina_v2_has_slopes_both_ways_and_a_gate(later: bool, tmp_path: Path) -> None:
    tensors, code = jina_v2(later), "jinaai/jina-bert-v2-qk-post-norm" if later else "jinaai/jina-bert-implementation"
    auto_map = {"AutoModel": f"{code}--modeling_bert.JinaBertModel"}
    assert_alike(
        written(tmp_path, tensors, **JINA_V2, auto_map=auto_map), lambda ids: jina_v2_states(tensors, ids, later)
    )


def test_jina_v2_gives_the_mean_and_takes_texts_as_long_as_its_file_says(tmp_path: Path) -> None:
    tensors = jina_v2(False)
    with opened(written(tmp_path, tensors, **JINA_V2)) as llm:
        [output] = llm.embed([TEXTS[3]], use_tqdm=False)
        mean = jina_v2_states(tensors, TEXTS[3], False).mean(0)
        np.testing.assert_allclose(output.outputs.data, functional.normalize(mean, dim=0), atol=3e-6)
        with pytest.raises(ValueError, match="max_model_len is 72"):
            llm.embed([[5] * 73])


def test_a_jina_v2_of_another_kind_is_refused_in_words(tmp_path: Path) -> None:
    folder = written(tmp_path, jina_v2(False), **{**JINA_V2, "feed_forward_type": "swiglu"})
    with pytest.raises(ValueError, match="feed_forward_type='swiglu' is not supported; geglu, reglu"):
        opened(folder)


# ------------------------------------------------------------------------------------------------------------ Jina v3
TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
RANK, ALPHA = 4, 2
FLASH = {"self_attn.o_proj.": "mixer.out_proj.", "post_attention_layernorm.": "norm1.", "post_mlp_layernorm.": "norm2.",
         "embeddings.LayerNorm.": "emb_ln.", "layers.": "encoder.layers."}  # fmt: skip


def published(tensors: Tensors) -> Tensors:
    """transformers' names and tensors, as the repositories have them."""
    found, stacks = {}, {}
    for name, tensor in tensors.items():
        for own, theirs in FLASH.items():
            name = name.replace(own, theirs)
        for at, part in enumerate("qkv"):
            if f"self_attn.{part}_proj" in name:
                stacks.setdefault(name.replace(f"self_attn.{part}_proj", "mixer.Wqkv"), {})[at] = tensor
                break
        else:
            found[name] = tensor.clone()  # the model is given other numbers later
    return found | {name: torch.cat([parts[at] for at in range(3)]) for name, parts in stacks.items()}


def adapted(tensors: Tensors) -> tuple[Tensors, dict[str, Tensors]]:
    """What a checkpoint holds with adapters of random numbers, and the weights that each task has then."""
    torch.manual_seed(3)
    held, tasks = {}, {task: dict(tensors) for task in TASKS}
    for name, tensor in tensors.items():
        if not name.endswith(".weight") or tensor.dim() != 2:
            held[f"roberta.{name}"] = tensor
            continue
        table, base = "embeddings" in name, f"roberta.{name.removesuffix('weight')}parametrizations.weight"
        outputs, inputs = tensor.shape
        a = torch.randn(5, *((outputs, RANK) if table else (RANK, inputs))) * 0.2
        b = torch.randn(5, *((RANK, inputs) if table else (outputs, RANK))) * 0.2
        held |= {f"{base}.original": tensor, f"{base}.0.lora_A": a, f"{base}.0.lora_B": b}
        for index, task in enumerate(TASKS):
            change = a[index] @ b[index] if table else b[index] @ a[index]
            tasks[task][name] = tensor + change * ALPHA / RANK
    return held, tasks


def jina_v3() -> tuple[Any, Tensors]:
    torch.manual_seed(0)
    config = transformers.JinaEmbeddingsV3Config(**SIZES, type_vocab_size=1, initializer_range=0.2)
    model = transformers.JinaEmbeddingsV3Model(config).eval()
    return model, published(model.state_dict())


def unpublished(tensors: Tensors) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        for own, theirs in FLASH.items():
            name = name.replace(theirs, own) if theirs != "encoder.layers." else name.replace("encoder.", "")
        if "mixer.Wqkv" in name:
            for part, share in zip("qkv", tensor.chunk(3), strict=True):
                found[name.replace("mixer.Wqkv", f"self_attn.{part}_proj")] = share
        else:
            found[name] = tensor
    return found


JINA_V3 = {**SIZES, "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "type_vocab_size": 1,
           "position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "lora_adaptations": TASKS,
           "lora_rank": RANK, "lora_alpha": ALPHA, "pad_token_id": 1, "matryoshka_dimensions": [16, 48],
           "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.Lora"}}  # fmt: skip


@pytest.mark.parametrize("task", [None, "retrieval.query", "separation", "none"])
def test_jina_v3_has_the_adapter_of_the_task_that_is_asked_for(task: str | None, tmp_path: Path) -> None:
    model, plain = jina_v3()
    held, tasks = adapted(plain)
    model.load_state_dict(unpublished(plain if task == "none" else tasks[task or "text-matching"]))
    folder = written(tmp_path, held, **JINA_V3)
    settings = {} if task is None else {"hf_overrides": {"task": task}}
    assert_alike(folder, lambda ids: model(torch.tensor([ids])).last_hidden_state[0], **settings)


def test_jinas_colbert_projects_each_token(tmp_path: Path) -> None:
    """jina-colbert-v2, by the class that vLLM names: no adapters, and a product among the model's tensors."""
    model, plain = jina_v3()
    weight = torch.randn(16, 48)
    tensors = {f"roberta.{name}": each for name, each in plain.items()}
    own = {"architectures": ["ColBERTJinaRobertaModel"], "lora_adaptations": None}
    with opened(written(tmp_path, {**tensors, "linear.weight": weight}, **{**JINA_V3, **own})) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False), strict=True):
            wanted = functional.normalize(model(torch.tensor([ids])).last_hidden_state[0] @ weight.T, dim=-1)
            np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-5)


def test_a_task_that_jina_v3_has_not_is_refused_by_name(tmp_path: Path) -> None:
    folder = written(tmp_path, adapted(jina_v3()[1])[0], **JINA_V3)
    with pytest.raises(ValueError, match="task='clustering' is none of this model's; choose one of retrieval.query"):
        opened(folder, hf_overrides={"task": "clustering"})


def test_adapters_that_are_not_whole_are_refused_by_name(tmp_path: Path) -> None:
    held, _ = adapted(jina_v3()[1])
    del held["roberta.encoder.layers.1.mlp.fc1.parametrizations.weight.0.lora_B"]
    with pytest.raises(ValueError, match=r"the files lack .*fc1|the files lack layers.1.mlp.up_proj"):
        opened(written(tmp_path, held, **JINA_V3))


def test_jinas_reranker_v2_is_xlm_roberta_under_other_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(**SIZES, type_vocab_size=1, initializer_range=0.2, num_labels=1)
    model = transformers.XLMRobertaForSequenceClassification(config).eval()
    theirs = {"attention.self.query": "self_attn.q_proj", "attention.self.key": "self_attn.k_proj",
              "attention.self.value": "self_attn.v_proj", "attention.output.dense": "mixer.out_proj",
              "attention.output.LayerNorm": "norm1", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
              "output.LayerNorm": "norm2", "encoder.layer.": "layers."}  # fmt: skip
    tensors = {}
    for name, tensor in model.state_dict().items():
        for own, other in theirs.items():
            name = name.replace(own, other)
        tensors[name] = tensor
    tensors = {name.replace("encoder.encoder.", "encoder."): each for name, each in published(tensors).items()}
    said = {**SIZES, "model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"],
            "type_vocab_size": 1, "position_embedding_type": "absolute", "pad_token_id": 1}  # fmt: skip
    with opened(written(tmp_path, tensors, **said, num_labels=1)) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, model(torch.tensor([ids])).logits[0].sigmoid(), atol=3e-6)


# ---------------------------------------------------------------------------------------------------------------- GTE
GTE = {**SIZES, "type_vocab_size": 2, "rope_theta": 500000.0, "position_embedding_type": "rope"}
OWN = {"layers.": "encoder.layer.", "self_attn.o_proj": "attention.o_proj", "post_attention_layernorm": "attn_ln",
       "post_mlp_layernorm": "mlp_ln"}  # fmt: skip


def gte(model: Any) -> Tensors:
    """In GTE's own names: q, k and v in one, and the feed-forward's second and first in one."""
    found, stacks = {}, {}
    for name, tensor in model.state_dict().items():
        for own, theirs in OWN.items():
            name = name.replace(own, theirs)
        for at, part in enumerate(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")):
            if part in name:
                stacks.setdefault(name.replace(part, "attention.qkv_proj"), {})[at] = tensor
        for at, part in enumerate(("mlp.up_proj", "mlp.gate_proj")):
            if part in name:
                stacks.setdefault(name.replace(part, "mlp.up_gate_proj"), {})[at] = tensor
        if "self_attn." not in name and "mlp.up_" not in name and "mlp.gate_" not in name:
            found[name] = tensor
    return found | {name: torch.cat([parts[at] for at in sorted(parts)]) for name, parts in stacks.items()}


def gte_model(ending: str = "Model", **more: Any) -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    config = transformers.GteConfig(**SIZES, type_vocab_size=2, initializer_range=0.2, rope_parameters=rope, **more)
    return getattr(transformers, f"Gte{ending}")(config).eval()


def stretched(scaling: dict[str, Any]) -> torch.Tensor:
    """Frequencies of heads of 8, by the two formulas that GTE's code has."""
    factor, mixed = scaling["factor"], scaling.get("mixed_b")
    if mixed is None:
        return (500000.0 * factor) ** (-torch.arange(0, 8, 2).double() / 8) / factor ** (2 / 8)
    a = np.log(factor) / 4**mixed
    return 500000.0 ** (-torch.arange(0, 8, 2).double() / 8) / torch.exp(a * torch.arange(1, 5).double() ** mixed)


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("NewModel", None),
        ("GteNewModel", {"type": "ntk", "factor": 2.0}),
        ("NewModel", {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}),
    ],
)
def test_new_is_gte_as_published(name: str, scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    model = gte_model()
    tensors = {f"new.{name}": each for name, each in gte(model).items()}
    if scaling is not None:
        model.rotary_emb.inv_freq = stretched(scaling).float()
    said = {**GTE, "model_type": "new", "architectures": [name], "pack_qkv": True, "unpad_inputs": False,
            "layer_norm_type": "layer_norm", "logn_attention_scale": False}  # fmt: skip
    said["rope_scaling"] = scaling and {"type": "ntk", **scaling}
    auto_map = {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"}
    folder = written(tmp_path, tensors, **said, auto_map=auto_map)
    assert_alike(folder, lambda ids: model(torch.tensor([ids])).last_hidden_state[0])


def test_snowflakes_gte_has_the_same_layout_without_a_prefix(tmp_path: Path) -> None:
    model = gte_model()
    folder = written(tmp_path, gte(model), **GTE, model_type="gte", architectures=["GteModel"])
    assert_alike(folder, lambda ids: model(torch.tensor([ids])).last_hidden_state[0])


@pytest.mark.parametrize("name", ["NewForSequenceClassification", "GteNewForSequenceClassification"])
def test_news_classifier_stands_behind_a_pooler(name: str, tmp_path: Path) -> None:
    """gte-multilingual-reranker: tanh of a product of the first token, then the score."""
    model = gte_model()
    torch.manual_seed(1)
    dense, score = torch.nn.Linear(48, 48), torch.nn.Linear(48, 1)
    tensors = {f"new.{name}": each for name, each in gte(model).items()}
    tensors |= {f"new.pooler.dense.{name}": each for name, each in dense.state_dict().items()}
    tensors |= {f"classifier.{name}": each for name, each in score.state_dict().items()}
    said = {**GTE, "model_type": "new", "architectures": [name], "num_labels": 1}
    with opened(written(tmp_path, tensors, **said)) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            first = model(torch.tensor([ids])).last_hidden_state[0, 0]
            np.testing.assert_allclose(output.outputs.data, score(dense(first).tanh()).sigmoid(), atol=3e-6)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ({"logn_attention_scale": True}, "logn_attention_scale"),
    ],
)
def test_what_new_may_say_and_is_not_computed_is_refused(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    said = {**GTE, "model_type": "new", "architectures": ["NewModel"], **entry}
    with pytest.raises(ValueError, match=message):
        opened(written(tmp_path, gte(gte_model()), **said))


# ----------------------------------------------------------------------------------------------------- Nomic Embed v2


@pytest.mark.parametrize("variant", ENCODERS["nomic_bert_moe"])
def test_nomics_experts(variant: str, tmp_path: Path) -> None:
    tiny = encoder("nomic_bert_moe", variant)
    with opened(tiny.folder) as llm:
        together = [each.outputs.data for each in llm.encode(TEXTS, EACH, use_tqdm=False)]
        for ids, states in zip(TEXTS, together, strict=True):
            exact = hidden(tiny.reference, ids).numpy()
            np.testing.assert_allclose(states, exact, atol=3e-5 * max(1, np.abs(exact).max()))
            assert np.array_equal(llm.encode([ids], EACH, use_tqdm=False)[0].outputs.data, states)
        vector = llm.embed([TEXTS[1]], use_tqdm=False)[0].outputs.data
    mean = together[1].mean(0)
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)


@pytest.mark.parametrize(
    ("entries", "why"),
    [({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights is True; False is known"),
     ({"num_experts": 3}, "not rows of 3 experts"), ({"prenorm": True}, "prenorm is True")],
)  # fmt: skip
def test_what_nomics_code_does_otherwise_is_refused(entries: dict[str, Any], why: str, tmp_path: Path) -> None:
    tiny = encoder("nomic_bert_moe", next(iter(ENCODERS["nomic_bert_moe"])))
    shutil.copytree(tiny.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **entries}))
    with pytest.raises(ValueError, match=why):
        opened(tmp_path)

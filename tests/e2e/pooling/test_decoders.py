"""Published decoders that answer with numbers, each small and random, and opened as its page says: embedders, rerankers
by logits of tokens, and reward models. Beside transformers' own models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

from quintet import LLM, PoolingParams
from quintet_tools.checkpoints.custom_families import PUBLISHED
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.sizes import LATENT, PLAIN
from tests.e2e.pooling.test_scores import WORDS, tokenizer

TEXTS = [[5, 6, 7], [1] * 40, [9], list(range(2, 60))]
SIZES: dict[str, Any] = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "intermediate_size": 72, "max_position_embeddings": 64,
                         "initializer_range": 0.2, "pad_token_id": 0}  # fmt: skip


def made(name: str, folder: Path, **more: Any) -> Any:
    """A model of transformers' class, saved."""
    torch.manual_seed(0)
    stem = next(each for each in ("Qwen3", "Qwen2", "Mistral", "Gemma", "Llama") if name.startswith(each))
    model = getattr(transformers, name)(getattr(transformers, f"{stem}Config")(**{**SIZES, **more})).eval()
    model.save_pretrained(folder)
    return model


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "skip_tokenizer_init": True, "use_tqdm": False, **settings})


def renamed(folder: Path, *names: str, **entries: Any) -> None:
    """Other entries in config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": list(names), **entries}))


def sentence(folder: Path, mode: str) -> None:
    """modules.json and a Pooling, as Sentence Transformers writes them."""
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 48, f"pooling_mode_{mode}": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(types.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def states(model: Any, ids: list[int], **given: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids]), **given).last_hidden_state[0]
    return found


# ------------------------------------------------------------------------------------------------------------ vectors
EMBEDDERS = {
    "Qwen3-Embedding": ("Qwen3Model", "Qwen3ForCausalLM", {"head_dim": 16}, {}),
    "e5-mistral": ("MistralModel", "MistralModel", {"sliding_window": 24}, {}),
    "gte-Qwen2": ("Qwen2Model", "Qwen2ForCausalLM", {"attn_implementation": "eager"}, {"is_causal": False}),
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_the_last_token_is_the_texts_vector(name: str, tmp_path: Path) -> None:
    kind, published, sizes, entries = EMBEDDERS[name]
    model = made(kind, tmp_path, **sizes)
    renamed(tmp_path, published, **entries)
    sentence(tmp_path, "lasttoken")
    wanted = []
    for ids in TEXTS:
        mask = {"attention_mask": {"full_attention": torch.zeros(1, 1, len(ids), len(ids))}} if entries else {}
        wanted.append(functional.normalize(states(model, ids, **mask)[-1], dim=0).numpy())
    with opened(tmp_path) as llm:
        for exact, output in zip(wanted, llm.embed(TEXTS, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, exact, atol=3e-6)
    made(kind, tmp_path, **{**sizes, "initializer_range": 0.05})
    renamed(tmp_path, published, **entries)
    with opened(tmp_path) as llm:
        exact_ones = [each.outputs.data for each in llm.embed(TEXTS, use_tqdm=False)]
    with opened(tmp_path, dtype="bfloat16") as llm:
        for exact, output in zip(exact_ones, llm.embed(TEXTS, use_tqdm=False), strict=True):
            assert output.outputs.data @ exact >= 0.999


@pytest.mark.parametrize("pooling", ["avg", "last"])
def test_a_llama_whose_tokens_see_both_ways(pooling: str, tmp_path: Path) -> None:
    """llama-nemotron-embed, as published: of a type that transformers does not know."""
    model = made("LlamaModel", tmp_path)
    renamed(tmp_path, "LlamaBidirectionalModel", model_type="llama_bidirec", pooling=pooling, auto_map={})
    with opened(tmp_path) as llm:
        for ids, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            both = states(model, ids, attention_mask=torch.zeros(1, 1, len(ids), len(ids)))
            wanted = functional.normalize(both.mean(0) if pooling == "avg" else both[-1], dim=0).numpy()
            np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-6)
    renamed(tmp_path, "LlamaBidirectionalModel", pooling="colbert")
    with pytest.raises(ValueError, match="pooling is 'colbert'; avg, cls, last, weighted_avg are known"):
        opened(tmp_path)


def test_a_llama_whose_tokens_see_both_ways_has_a_score_of_their_mean(tmp_path: Path) -> None:
    """llama-nemotron-rerank: a product behind what its embedder gives."""
    model = made("LlamaForSequenceClassification", tmp_path, num_labels=1)
    renamed(tmp_path, "LlamaBidirectionalForSequenceClassification", model_type="llama_bidirec", pooling="avg")
    with opened(tmp_path) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            both = states(model.model, ids, attention_mask=torch.zeros(1, 1, len(ids), len(ids)))
            np.testing.assert_allclose(output.outputs.data, model.score(both.mean(0)).sigmoid(), atol=3e-6)


def test_latent_attention_both_ways_is_that_of_transformers(tmp_path: Path) -> None:
    """A DeepSeek-V3 whose tokens see both ways, by the class that vLLM names: the mean of its rows."""
    torch.manual_seed(0)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.DeepseekV3Model(transformers.DeepseekV3Config(**{**PLAIN, **LATENT, **plain})).eval()
    scatter(model)
    model.save_pretrained(tmp_path)
    renamed(tmp_path, "DeepseekV3BidirectionalModel", is_causal=False)
    with opened(tmp_path, pooler_config={"pooling_type": "MEAN"}) as llm:
        for ids, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            both = states(model, ids, attention_mask=torch.zeros(1, 1, len(ids), len(ids))).mean(0)
            np.testing.assert_allclose(output.outputs.data, functional.normalize(both, dim=0), atol=3e-6)


def test_voyages_embedding_is_a_product_of_a_mean_both_ways(tmp_path: Path) -> None:
    """voyage-4-nano: the product's outputs are counted by num_labels."""
    model = made("Qwen3Model", tmp_path, head_dim=16)
    head = torch.nn.Linear(48, 32, bias=False)
    behind(tmp_path, head, "linear.")
    renamed(tmp_path, "VoyageQwen3BidirectionalEmbedModel", num_labels=32)
    sentence(tmp_path, "mean_tokens")
    both = {len(ids): {"full_attention": torch.zeros(1, 1, len(ids), len(ids))} for ids in TEXTS}
    with opened(tmp_path) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            wanted = head(states(model, ids, attention_mask=both[len(ids)])).mean(0)
            np.testing.assert_allclose(output.outputs.data, functional.normalize(wanted, dim=0), atol=3e-6)


def test_jinas_reranker_has_a_vector_of_each_document_and_then_of_the_query(tmp_path: Path) -> None:
    """jina-reranker-v3: rows at two tokens, behind two products with a ReLU between."""
    trunk = made("Qwen3Model", tmp_path, head_dim=16)
    head = torch.nn.Sequential(
        torch.nn.Linear(48, 24, bias=False), torch.nn.ReLU(), torch.nn.Linear(24, 16, bias=False)
    )
    behind(tmp_path, head, "projector.")
    renamed(tmp_path, "JinaForRanking", embedding_size=16, doc_embed_token_id=77, query_embed_token_id=78)
    ids = [5, 6, 78, 8, 77, 9, 10, 77, 11]
    with opened(tmp_path) as llm, torch.no_grad():
        [output] = llm.encode([ids], pooling_task="token_embed", use_tqdm=False)
        np.testing.assert_allclose(output.outputs.data, head(states(trunk, ids)[[4, 7, 2]]), atol=3e-6)


# -------------------------------------------------------------------------------------------------------- rerankers
RERANKERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "Qwen3-Reranker": (
        "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True},
        {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
         "is_original_qwen3_reranker": True}, lambda x: (x[9] - x[4]).sigmoid(),
    ),
    "bge-reranker-v2-gemma": (
        "GemmaForCausalLM", {"head_dim": 16},
        {"architectures": ["GemmaForSequenceClassification"], "classifier_from_token": ["Yes"],
         "method": "no_post_processing"}, lambda x: x[11].sigmoid(),
    ),
    "mxbai-rerank-v2": (
        "Qwen2ForCausalLM", {"tie_word_embeddings": True},
        {"architectures": ["Qwen2ForSequenceClassification"], "classifier_from_token": ["0", "1"],
         "method": "from_2_way_softmax"}, lambda x: (x[13] - x[12]).sigmoid(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RERANKERS)
def test_a_reranker_goes_by_what_its_next_token_would_be(name: str, tmp_path: Path) -> None:
    kind, sizes, overrides, score = RERANKERS[name]
    model = made(kind, tmp_path, **sizes)
    vocabulary = {"no": 4, "yes": 9, "Yes": 11, "0": 12, "1": 13}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    with opened(tmp_path, runner="pooling", hf_overrides=overrides) as llm, torch.no_grad():
        outputs = llm.encode(TEXTS, pooling_task="score", use_tqdm=False)
        for ids, output in zip(TEXTS, outputs, strict=True):
            wanted = score(model(torch.tensor([ids])).logits[0, -1])
            np.testing.assert_allclose(output.outputs.data[0], wanted, atol=3e-6)


def test_a_classifier_with_one_class_is_a_reward(tmp_path: Path) -> None:
    """Skywork-Reward of Llama: the score of the last token, as it is where that is asked."""
    model = made("LlamaForSequenceClassification", tmp_path, num_labels=1)
    with opened(tmp_path) as llm, torch.no_grad():
        plain = PoolingParams(use_activation=False)
        for ids, output in zip(TEXTS, llm.classify(TEXTS, pooling_params=plain, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, model(torch.tensor([ids])).logits[0], atol=3e-5)


# ------------------------------------------------------------------------------------------------------------ rewards
def behind(folder: Path, head: Any, prefix: str) -> None:
    """Puts a head's tensors beside a trunk's, which are named as within a model."""
    tensors = {f"model.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    tensors |= {f"{prefix}{name}": each.clone() for name, each in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_rewards_of_steps_are_probabilities_at_their_tags(tmp_path: Path) -> None:
    """Qwen2.5-Math-PRM: two products with a ReLU between, two classes, at the token that ends a step."""
    trunk = made("Qwen2Model", tmp_path)
    head = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, 2))
    behind(tmp_path, head, "score.")
    renamed(tmp_path, "Qwen2ForProcessRewardModel", id2label={"0": "LABEL_0", "1": "LABEL_1"})
    ids = [5, 6, 77, 8, 9, 10, 77, 11]
    with opened(tmp_path, pooler_config={"pooling_type": "STEP", "step_tag_id": 77}) as llm, torch.no_grad():
        [output] = llm.reward([ids], use_tqdm=False)
        wanted = head(states(trunk, ids))[[2, 6]].softmax(-1)
        np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-6)


def test_internlm2s_reward_is_a_product_of_each_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    head = torch.nn.Linear(48, 1, bias=False)
    theirs = PUBLISHED["internlm2"].tensors(dict(model.state_dict()), SIZES)
    tensors = {name: each.contiguous() for name, each in theirs.items() if name != "output.weight"}
    save_file({**tensors, "v_head.weight": head.weight.detach()}, tmp_path / "model.safetensors")
    said = {**SIZES, "model_type": "internlm2", "architectures": ["InternLM2ForRewardModel"], "bias": False}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with opened(tmp_path) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.reward(TEXTS, use_tqdm=False), strict=True):
            wanted = head(states(model.model, ids))
            np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-5)


# --------------------------------------------------------------------------------------------------- late interaction
@pytest.mark.parametrize("name", ["ModernBertModel", "ColBERTModernBertModel"])
def test_modernbert_has_a_vector_for_each_token_behind_a_product(name: str, tmp_path: Path) -> None:
    """GTE-ModernColBERT, as PyLate writes it; vLLM wants another class's name."""
    torch.manual_seed(0)
    sizes = {name: each for name, each in SIZES.items() if name != "num_key_value_heads"}
    special = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = transformers.ModernBertConfig(**{**sizes, **special, "vocab_size": 4 + len(WORDS)}, local_attention=16)
    model = transformers.ModernBertModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "1_Dense").mkdir()
    weight = torch.randn(16, 48)
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    said = {"in_features": 48, "out_features": 16, "bias": False, "activation_function": "torch.nn.Identity"}
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(said))
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
              {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"}]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    query, documents, hf = "where is the cat", ["the cat sat on the mat", "a dog ran"], tokenizer()

    def tokens(text: str) -> torch.Tensor:
        given = hf(text, return_tensors="pt")
        return functional.normalize(states(model, given["input_ids"][0].tolist()) @ weight.T, dim=-1)

    with opened(tmp_path, skip_tokenizer_init=False, hf_overrides={"architectures": [name]}) as llm:
        got = [each.outputs.score for each in llm.score(query, documents, use_tqdm=False)]
    wanted = [float((tokens(query) @ tokens(each).T).max(1).values.sum()) for each in documents]
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_lfm2s_colbert_projects_each_token(tmp_path: Path) -> None:
    """LFM2-ColBERT, by the class that vLLM names: a decoder with short convolutions, and a product behind it."""
    torch.manual_seed(0)
    config = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"])
    model = transformers.Lfm2Model(config).eval()
    model.save_pretrained(tmp_path)
    head = torch.nn.Linear(48, 16, bias=False)
    behind(tmp_path, head, "linear.")
    renamed(tmp_path, "ColBERTLfm2Model")
    with opened(tmp_path) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False), strict=True):
            wanted = functional.normalize(head(states(model, ids)), dim=-1)
            np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-5)

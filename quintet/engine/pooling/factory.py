"""Settles that a model is run for numbers, and makes what turns its hidden states into them."""

import json
from pathlib import Path
from typing import Any

from quintet.config import EngineConfig
from quintet.engine.pooling import heads
from quintet.engine.pooling.heads import Head
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.engine.pooling.pooler import Pooler
from quintet.engine.pooling.sentence_modules import output_width, read_modules
from quintet.hub.pooling_task import RANKING, Pooling, is_pooling_model, plan_pooling
from quintet.hub.sentence_transformers import GGUF
from quintet.layers.decoder import ModelBase
from quintet.model_loader.weight_files import WeightFiles

_NAMED = ("tokenizer.json",)
_ACTIVATIONS = ("Identity", "Sigmoid", "Softmax")  # behind a cross-encoder's logits, classes of torch.nn


def pooling_of(config: EngineConfig, whole: Any, folder: Path, family: type[ModelBase]) -> Pooling | None:
    """Returns how the model's hidden states are pooled; None if it generates text. ValueError if it cannot run."""
    if not is_pooling_model(config, vars(whole), folder):
        if family.is_encoder:
            raise ValueError(
                f"{whole.model_type} gives hidden states and no logits, so it generates nothing; leave out "
                "runner='generate', or choose a decoder model"
            )
        return None
    hf_config = whole.get_text_config()
    hf_config.architectures = getattr(hf_config, "architectures", None) or getattr(whole, "architectures", None)
    return plan_pooling(config, hf_config, folder, family.is_encoder)


def resolve_pooling(config: EngineConfig, pooling: Pooling, reasons: list[str]) -> EngineConfig:
    """Returns the settings that pooling needs; adds to `reasons`."""
    shown = pooling.sequence if pooling.tasks[0] in ("embed", "classify", "score") else pooling.token
    reasons.append(f"runner pooling: {', '.join(pooling.tasks)}, by {shown}")
    if config.speculative_config is not None:
        raise ValueError("speculative_config guesses tokens of text, and this model gives numbers; leave it out")
    if config.enable_prompt_embeds:
        raise ValueError("enable_prompt_embeds: texts that become numbers are tokens; leave it out")
    changes: dict[str, Any] = {"runner": "pooling"}
    if not pooling.causal:
        reasons.append("each text in one step, nothing cached: its tokens see those after them")
        changes |= {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    elif pooling.sequence != "LAST":
        changes |= {"enable_prefix_caching": False}  # the hidden states of all tokens are wanted
    return config.replace(**changes)


PADDED_TYPES = ("siglip_text_model", "siglip2_text_model")  # whose texts were filled up in training


def head_tensors(pooling: Pooling | None) -> tuple[str, ...]:
    """Returns patterns of tensors that are no part of the trunk of a model that generates nothing."""
    if pooling is None:
        return ()
    beside = [rf"{each.config['tensor']}\.weight" for each in pooling.sentence.modules if each.package == GGUF]
    projects = pooling.sentence.pools_tokens or pooling.projected
    return (*heads.HEAD_TENSORS, *(heads.PROJECTIONS if projects else ()), *beside)


def bounds_of(pooling: Pooling, hf_config: Any, max_model_len: int) -> PoolingBounds:
    """Returns the limits of pooling requests."""
    sentence = pooling.sentence
    return PoolingBounds(
        tasks=pooling.tasks,
        max_model_len=max_model_len,
        width=_width(pooling, hf_config),
        sequence=pooling.sequence,
        matryoshka_dims=pooling.matryoshka,
        chunks_long_texts=pooling.chunked,
        max_embed_len=pooling.max_embed_len,
        prompts=dict(sentence.settings.prompts),
        default_prompt=sentence.settings.default_prompt,
        truncates_left=pooling.truncates_left,
        lowercase=sentence.settings.lowercase,
        similarity=sentence.settings.similarity or "cosine",
        skiplist_words=sentence.settings.skiplist_words if sentence.pools_tokens else (),
        expands_queries=sentence.settings.expands_queries,
        padded_len=hf_config.max_position_embeddings if hf_config.model_type in PADDED_TYPES else 0,
        pad_token_id=getattr(hf_config, "pad_token_id", None) or 0,
        has_separator=bool(getattr(hf_config, "use_sep_token", not pooling.causal)),
    )


def _width(pooling: Pooling, hf_config: Any) -> int:
    """Returns the numbers of an embedding, before a request's own dimensions."""
    if pooling.splade:
        return int(hf_config.vocab_size)
    if pooling.projected and not pooling.sentence.modules:
        return int(getattr(hf_config, "embedding_size" if pooling.projected == RANKING else "num_labels", 0) or 0)
    return output_width(pooling.sentence.modules, hf_config.hidden_size)


def make_pooler(pooling: Pooling, files: WeightFiles | None, hf_config: Any, folder: Path) -> Pooler:
    """Builds the pooler with the checkpoint's heads; random weights have none. ValueError if a head is missing."""
    if pooling.token_heads:
        return _sparse_pooler(pooling, files, hf_config, folder)
    if pooling.convert == "embed":
        if pooling.projects_tokens:
            projection = (heads.colbert_projection(heads.raw_tensors(files)),) if files else ()
            return Pooler(pooling, {"token_embed": projection})
        if pooling.splade:
            return Pooler(
                pooling, {"embed": heads.masked_lm_head(heads.raw_tensors(files), hf_config)} if files else {}
            )
        functions = read_modules(pooling.sentence.modules, hf_config.hidden_size)
        if pooling.projected and files is not None:
            functions = (*heads.projection(heads.raw_tensors(files), pooling.projected == RANKING), *functions)
            return Pooler(pooling, dict.fromkeys(pooling.tasks, functions))
        return Pooler(pooling, {"token_embed" if pooling.sentence.pools_tokens else "embed": functions})
    tasks = pooling.tasks
    if files is None:
        return Pooler(pooling, {}, softmax="score" not in tasks)
    tensors = heads.raw_tensors(files)
    named = getattr(hf_config, "classifier_from_token", None)
    if named:
        head = _head_between_tokens(tensors, hf_config, folder, named)
        return Pooler(pooling, dict.fromkeys(tasks, head), softmax=len(head[-1].weight) > 1, regression=False)
    of_tokens = "score" not in tasks and "classify" not in tasks
    head = heads.classifier(tensors, hf_config, of_tokens)
    softmax, regression = _logit_transforms(pooling, hf_config, len(head[-1].weight))
    return Pooler(pooling, dict.fromkeys(tasks, head), softmax, regression)


def _sparse_pooler(pooling: Pooling, files: WeightFiles | None, hf_config: Any, folder: Path) -> Pooler:
    """BGE M3's: a vector of each token but the first, and how much each counts but the first and the last."""
    first, last = getattr(hf_config, "bos_token_id", None), getattr(hf_config, "eos_token_id", None)
    left_out = {"token_embed": (first, None), "token_classify": (first, last)}
    named = {"token_embed": "colbert_linear.pt", "token_classify": "sparse_linear.pt"} if files else {}
    made = {task: (heads.read_linear_file(folder / name),) for task, name in named.items()}
    return Pooler(pooling, made, relu=True, excluded_tokens=left_out)


def _logit_transforms(pooling: Pooling, hf_config: Any, outputs: int) -> tuple[bool, bool]:
    """Returns what Pooler does with the logits: its arguments softmax and regression."""
    problem = getattr(hf_config, "problem_type", None)
    activation = _activation(pooling, hf_config)
    unnamed = problem == "regression" or (pooling.convert == "reward" and outputs == 1)
    plain = activation == "Identity" or (activation is None and unnamed)
    softmax = outputs > 1 and problem != "multi_label_classification"
    return (softmax if activation in (None, "Identity") else activation == "Softmax"), plain


def _activation(pooling: Pooling, hf_config: Any) -> str | None:
    """Returns the function that a cross-encoder's files name behind its logits: newer releases of Sentence Transformers
    keep it in config_sentence_transformers.json, older ones in two places of config.json."""
    beside = getattr(hf_config, "sentence_transformers", None)
    name = (
        pooling.sentence.settings.activation
        or (beside.get("activation_fn") if isinstance(beside, dict) else None)
        or getattr(hf_config, "sbert_ce_default_activation_function", None)
    )
    if name is None:
        return None
    kind = str(name).rpartition(".")[2]
    if kind not in _ACTIVATIONS or not str(name).startswith("torch."):
        raise ValueError(f"the classifier's activation function is {name!r}; of torch's, {', '.join(_ACTIVATIONS)} are "
                         "computed here")  # fmt: skip
    return kind


def _head_between_tokens(tensors: Any, hf_config: Any, folder: Path, named: Any) -> Head:
    """A head out of the rows that the vocabulary's head has for these tokens."""
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named) or not 1 <= len(named) <= 16:
        raise ValueError("classifier_from_token: a list of one to 16 tokens, by their text")
    method = getattr(hf_config, "method", None) or "no_post_processing"
    if method not in ("no_post_processing", "from_2_way_softmax"):
        raise ValueError(f"method={method!r}: 'no_post_processing' and 'from_2_way_softmax' are known")
    original = bool(getattr(hf_config, "is_original_qwen3_reranker", False))
    vocabulary = json.loads((folder / _NAMED[0]).read_text(encoding="utf-8"))["model"]["vocab"]
    ids = [vocabulary.get(each, vocabulary.get(f"▁{each}")) for each in named]
    if None in ids:
        raise ValueError(
            f"classifier_from_token: {named[ids.index(None)]!r} is no token of this model; give one that is"
        )
    names = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight", "model.model.embed_tokens.weight")
    name = next((each for each in names if each in tensors), None)
    if name is None:
        raise ValueError("classifier_from_token: the files hold neither lm_head.weight nor embed_tokens.weight")
    table = heads.read_tensor(tensors, name, ids)
    return heads.between_tokens(table, ids, "from_2_way_softmax" if original else method)

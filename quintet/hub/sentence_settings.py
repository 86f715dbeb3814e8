"""Reads the settings that Sentence Transformers and PyLate write beside a checkpoint: lengths, prompts, similarity.

Newer releases keep some of them in other files than older ones; both places are read.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.common.json_files import read_object
from quintet.hub.config_checks import MAX_INT32

LENGTHS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
           "sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
           "sentence_xlnet_config.json")  # fmt: skip
BESIDE = "config_sentence_transformers.json"
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan", "meanmaxsim")
# what a Transformer module gives: its task -> (the model's output, the feature it is stored as)
_OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
# arguments of from_pretrained() that change no number, or only how it is computed
_HARMLESS_ARGS = ("trust_remote_code", "attn_implementation", "torch_dtype", "dtype", "device_map", "add_pooling_layer",
                  "use_cache", "padding_side", "use_fast", "revision", "token", "cache_dir", "local_files_only",
                  "use_memory_efficient_attention", "unpad_inputs", "low_cpu_mem_usage")  # fmt: skip
_ARGS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
# keys that PyLate adds to config_sentence_transformers.json
_PYLATE = ("query_prefix", "document_prefix", "query_length", "document_length", "attend_to_expansion_tokens",
           "attend_to_mask_tokens", "skiplist_words", "do_query_expansion", "query_expansion")  # fmt: skip


@dataclass(frozen=True)
class SentenceSettings:
    """Settings of one folder; the defaults are those of a folder without these files."""

    model_type: str | None = None  # SentenceTransformer, CrossEncoder, MultiVectorEncoder, or PyLate's ColBERT
    max_length: int | None = None  # tokens
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: put before a text
    default_prompt: str | None = None  # its name
    lowercase: bool = False  # texts are brought to lower case first
    dimensions: int | None = None  # numbers that are kept of a finished embedding
    similarity: str | None = None  # of SIMILARITIES, of two embeddings
    activation: str | None = None  # of a cross-encoder's score, by the name of its class
    skiplist_words: tuple[str, ...] = ()  # tokens of documents that count for no score (late interaction)
    expands_queries: bool = False  # late interaction: mask tokens are added to queries


def read_settings(folder: Path, task: str = "feature-extraction") -> SentenceSettings:
    """`task`: what the Transformer must compute. ValueError names what is not obeyed here."""
    files = (folder / name for name in LENGTHS if (folder / name).is_file())
    file, trunk = next(((file, content) for file in files if (content := read_object(file))), (folder / LENGTHS[0], {}))
    _check_trunk(file, trunk, task)
    beside = folder / BESIDE
    config = read_object(beside) if beside.is_file() else {}
    prompts = _prompts(beside, config)
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ValueError(f"{beside}: default_prompt_name is {default!r}, and the prompts are {', '.join(prompts)}")
    if default and prompts[default] and task != "feature-extraction":
        raise ValueError(f"{beside}: default_prompt_name {default!r} is of a classifier, for which it is not obeyed; "
                         "remove it, and put the prompt before the texts")  # fmt: skip
    dimensions, similarity = config.get("truncate_dim"), config.get("similarity_fn_name")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise ValueError(f"{beside}: truncate_dim is {dimensions!r}, not a number of dimensions; correct it")
    activation = config.get("activation_fn")
    pylate = config.get("model_type") == "ColBERT" or any(name in config for name in _PYLATE)
    skipped = config.get("skiplist_words")
    return SentenceSettings(
        model_type=config.get("model_type"),
        max_length=_max_length(folder, file, trunk),
        prompts=prompts,
        default_prompt=default,
        lowercase=bool(trunk.get("do_lower_case")),
        dimensions=dimensions,
        similarity=similarity if similarity in SIMILARITIES else None,
        activation=activation if isinstance(activation, str) else None,
        skiplist_words=tuple((string.punctuation if pylate else ()) if skipped is None else skipped),
        expands_queries=bool(trunk.get("query_expansion") or config.get("query_expansion"))
        or (pylate and "query_expansion" not in config and config.get("do_query_expansion") is not False),
    )


def _prompts(file: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the prompts by name, PyLate's prefixes before them."""
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str | None) for each in prompts.values()):
        raise ValueError(f"{file}: prompts are texts by name, not {type(prompts).__name__}; correct it")
    prompts = {name: text or "" for name, text in prompts.items()}
    for name in ("query", "document"):
        prefix = config.get(f"{name}_prefix")
        if isinstance(prefix, str):
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    return prompts


def _check_trunk(file: Path, trunk: Mapping[str, Any], task: str) -> None:
    """Refuses entries of a Transformer module that change what it computes."""
    output, feature = _OUTPUTS[task]
    if (asked := trunk.get("transformer_task", task)) != task:
        raise ValueError(f"{file}: transformer_task is {asked!r}, and {task!r} is computed here")
    if (named := trunk.get("module_output_name", feature)) != feature:
        raise ValueError(f"{file}: module_output_name is {named!r}, and {feature!r} is computed here")
    text = {"method": "forward", "method_output_name": output}
    modalities = trunk.get("modality_config", {"text": text})
    if not isinstance(modalities, dict) or modalities.get("text") != text or "message" in modalities:
        raise ValueError(
            f"{file}: modality_config is {modalities!r}; only texts without a chat template, with {text}, are computed "
            "here"
        )
    for key in ("processing_kwargs", "tokenizer_name_or_path"):
        if trunk.get(key):
            raise ValueError(f"{file}: {key} {trunk[key]!r} is not obeyed here; remove it if texts need none of it")
    for key in _ARGS:
        given = trunk.get(key) or {}
        obeyed = ("model_max_length",) if key in ("tokenizer_args", "processor_kwargs") else ()
        if other := [name for name in given if name not in (*_HARMLESS_ARGS, *obeyed)]:
            raise ValueError(f"{file}: {key} has {', '.join(other)}, not obeyed here; move it to the file it changes")


def _max_length(folder: Path, file: Path, trunk: Mapping[str, Any]) -> int | None:
    """Returns the length from the Transformer's arguments, its file, or the tokenizer's, in this order."""
    args = {**(trunk.get("tokenizer_args") or {}), **(trunk.get("processor_kwargs") or {})}
    length = args.get("model_max_length", trunk.get("max_seq_length"))
    if length is None:
        return tokenizer_length(folder)
    if type(length) is not int or length < 1:
        raise ValueError(f"{file}: max_seq_length is {length!r}, not a number of tokens; correct it")
    return length


def tokenizer_length(folder: Path) -> int | None:
    """Returns the length that newer releases keep in tokenizer_config.json; None for a number beyond any text, which
    means no limit."""
    length = read_tokenizer_config(folder).get("model_max_length")
    return length if type(length) is int and 0 < length <= MAX_INT32 else None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Returns the entries of tokenizer_config.json; none if there is no such file."""
    file = folder / "tokenizer_config.json"
    return read_object(file) if file.is_file() else {}

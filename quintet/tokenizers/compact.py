"""Compact JSON form of a tokenizer with a BPE model: it loads in less time and memory than tokenizers' own JSON."""

import base64
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.common.imports import without_garbage_collection
from quintet.gguf.tokenizer import BPEModel

# Parameters of the model in tokenizers' JSON, which are also arguments of its class.
PARAMETERS = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip


def compact(described: str) -> dict[str, Any] | None:
    """Returns the compact form of tokenizers' JSON (Tokenizer.to_str()): the tokens by their ids, the merges as pairs
    of ids, and all else as it is. None for other models than BPE, and where ids have gaps."""
    whole = json.loads(described)
    model = whole["model"]
    if model.get("type") != "BPE" or {*model} - {"type", "vocab", "merges", *PARAMETERS}:
        return None
    ids, tokens = model["vocab"], sorted(model["vocab"], key=model["vocab"].__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        return None
    pairs = _pairs(model["merges"], ids)
    if pairs is None:
        return None
    parameters = {name: model[name] for name in PARAMETERS if model.get(name) is not None}
    return _form(tokens, pairs, parameters, whole)


def compact_model(backend: Any, model: BPEModel) -> dict[str, Any]:
    """Returns the compact form of a tokenizer whose BPE model was made of these arguments. tokenizers' JSON of the
    whole, which takes 1 s with 260k tokens, is not made."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    shell = Tokenizer(BPE())  # all but the model
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(shell, part, value)
    shell.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    return _form(list(model.tokens), model.pairs, model.parameters, json.loads(shell.to_str()))


def _form(
    tokens: list[str], pairs: "array[int]", parameters: Mapping[str, Any], described: Mapping[str, Any]
) -> dict[str, Any]:
    """`described`: tokenizers' JSON, the model in which is not looked at."""
    added, empty = described["added_tokens"], {"type": "BPE", "vocab": {}, "merges": []}
    return {
        "tokens": tokens,
        "merges": base64.b64encode(_little_endian(array("I", pairs)).tobytes()).decode(),
        "parameters": dict(parameters),
        "added": [{name: value for name, value in each.items() if name != "id"} for each in added],
        "rest": {**described, "model": empty, "added_tokens": []},
    }


def restore(form: Mapping[str, Any]) -> Any:
    """Returns the tokenizer of compact()'s result. KeyError, TypeError or ValueError for another content."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE

    tokens, pairs = form["tokens"], _little_endian(array("I", base64.b64decode(form["merges"], validate=True)))
    if len(pairs) % 2 or (pairs and max(pairs) >= len(tokens)):
        raise ValueError("its merges are not pairs of its tokens")
    with without_garbage_collection():  # which would walk hundreds of thousands of pairs, none of them garbage
        merges = BPEModel(tokens, pairs, {}).merges
        model = BPE(dict(zip(tokens, range(len(tokens)), strict=True)), merges, **form["parameters"])
    made = Tokenizer.from_str(json.dumps(form["rest"]))
    made.model = model
    made.add_tokens([AddedToken(**each) for each in form["added"]])
    return made


def _pairs(merges: Sequence[Any], ids: Mapping[str, int]) -> "array[int] | None":
    """The ids of each merge's two parts, one after the other; None where a part is no token."""
    try:
        return array("I", (ids[part] for first, second in map(_parts, merges) for part in (first, second)))
    except (KeyError, ValueError):
        return None


def _parts(merge: Any) -> Sequence[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _little_endian(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

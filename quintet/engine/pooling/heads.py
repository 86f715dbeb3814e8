"""Pooling heads behind the trunk: small linear layers on the host, in float32, by their names in checkpoints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quintet.interface.weights import StoredTensor
from quintet.layers.decoder import ModelBase
from quintet.model_loader.loader import tensors_of
from quintet.model_loader.torch_checkpoint import TorchFile
from quintet.model_loader.weight_files import WeightFiles

FloatRows = np.ndarray[Any, np.dtype[np.float32]]
# patterns of tensors that heads are made of: a trunk has no place for them
HEAD_TENSORS = (
    r"(.*\.)?pooler\..*",
    r"(cls|lm_head|generator_predictions|discriminator_predictions|vocab_(transform|layer_norm|projector))\..*",
    r"((model|transformer)\.)?(pre_classifier|classifier|score|v_head|value_head|rank_head)\..*",
    r"(head|decoder|qa_outputs|predictions)\..*",
)
# tensors of the projection of a model for late interaction
PROJECTIONS = (
    r"(colbert_)?linear\.(weight|bias)",
    r"embedding_proj_layer\.(weight|bias)",
    r"projector\.[02]\.(weight|bias)",
)
ACTIVATIONS = ("tanh", "relu", "gelu", "silu", "sigmoid", "identity")


def _erf(x: FloatRows) -> FloatRows:
    out: FloatRows = torch.erf(torch.from_numpy(x)).numpy()
    return out


def _sigmoid(x: FloatRows) -> FloatRows:
    out: FloatRows = torch.sigmoid(torch.from_numpy(x)).numpy()
    return out


_ACTIVATIONS: Mapping[str, Callable[[FloatRows], FloatRows]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * np.float32(0.5) * (1 + _erf(x * np.float32(2**-0.5))),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class HeadNormWeights:
    """A layer norm."""

    weight: FloatRows
    bias: FloatRows | None
    eps: float

    def __call__(self, x: FloatRows) -> FloatRows:
        centered = x - x.mean(-1, keepdims=True, dtype=np.float32)
        variance = np.square(centered).mean(-1, keepdims=True, dtype=np.float32)
        normed = centered / np.sqrt(variance + np.float32(self.eps)) * self.weight
        return normed if self.bias is None else normed + self.bias


@dataclass(frozen=True)
class PoolingLinear:
    """x [n, inputs] -> activation(x @ weight.T + bias), normed: [n, outputs]."""

    weight: FloatRows  # [outputs, inputs]
    bias: FloatRows | None = None
    activation: str = "identity"
    norm: HeadNormWeights | None = None
    adds_input: bool = False  # to the output: as it is,
    residual: FloatRows | None = None  # or a product with these weights [outputs, inputs]
    source: str = ""  # the module's name in the checkpoint, where adapters may have another weight for it

    def __call__(self, x: FloatRows) -> FloatRows:
        out = _product(self.weight, x)
        out = _ACTIVATIONS[self.activation](out if self.bias is None else out + self.bias).astype(np.float32)
        if self.adds_input:
            out = out + (x if self.residual is None else _product(self.residual, x))
        return out if self.norm is None else self.norm(out)


def _product(weight: FloatRows, x: FloatRows) -> FloatRows:
    """Row by row: a product of many rows has other bits than one of each."""
    return np.stack([weight @ row for row in x]) if len(x) else np.zeros((0, len(weight)), np.float32)


def unit_length(x: FloatRows) -> FloatRows:
    """Scales each row to length 1."""
    lengths = np.sqrt(np.square(x, dtype=np.float64).sum(-1, keepdims=True))
    return (x / np.maximum(lengths, 1e-12)).astype(np.float32)


Head = tuple[PoolingLinear, ...]


class HeadLayer(NamedTuple):
    """Location of one linear layer of a head: the end of its tensors' names, and what follows the layer."""

    name: str
    activation: str = "identity"
    norm: str = ""  # the end of the names of a layer norm's tensors


def raw_tensors(weights: WeightFiles) -> Mapping[str, StoredTensor]:
    """Every tensor by the name that the file has for it."""
    return tensors_of(weights, ModelBase)


def classifier(tensors: Mapping[str, StoredTensor], hf_config: Any, of_tokens: bool) -> Head:
    """Returns the head that computes classes, scores or rewards of hidden states. ValueError if there is none."""
    for parts in _known_heads(hf_config, of_tokens):
        found = [_find_linear(tensors, part.name) for part in parts]
        if all(found):
            return tuple(
                _read_linear(tensors, prefix, part, _eps(hf_config)) for prefix, part in zip(found, parts, strict=True)
            )
    near = [name for name in tensors if "." in name and name.split(".")[-2] not in ("dense",)][-3:]
    raise ValueError(
        f"the files hold no classifier that is known here (of their tensors the last are {', '.join(near)}); choose "
        "another convert, or a model with a classification head"
    )


def _known_heads(config: Any, of_tokens: bool) -> Iterable[Sequence[HeadLayer]]:
    """Heads, in the order in which they are looked for."""
    act = str(getattr(config, "classifier_activation", None) or "gelu")
    act = act if act in ACTIVATIONS else "gelu"
    pooled = str(getattr(config, "pooler_hidden_act", "tanh"))  # DeBERTa's
    kind = getattr(config, "model_type", "")
    between = {"electra": "gelu", "roformer": str(getattr(config, "hidden_act", "gelu"))}.get(kind, "tanh")
    yield HeadLayer("classifier.dense", between), HeadLayer("classifier.out_proj")
    yield HeadLayer("pre_classifier", "relu"), HeadLayer("classifier")
    yield HeadLayer("head.dense", act, "head.norm"), HeadLayer("classifier")
    if not of_tokens:
        yield HeadLayer("pooler.dense", pooled), HeadLayer("classifier")
        yield HeadLayer("pooler", "tanh"), HeadLayer("classifier")
    yield (HeadLayer("classifier"),)
    yield HeadLayer("score.0", "relu"), HeadLayer("score.2")
    yield (HeadLayer("score"),)
    yield (HeadLayer("v_head"),)
    yield (HeadLayer("value_head.summary"),)


def _eps(config: Any) -> float:
    return float(getattr(config, "norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-5)


def _find_linear(tensors: Mapping[str, StoredTensor], end: str) -> str:
    """Returns the name of a linear layer that has a weight in the files; "": none."""
    return next(
        (n.removesuffix(".weight") for n in tensors if n == f"{end}.weight" or n.endswith(f".{end}.weight")), ""
    )


def _read_linear(tensors: Mapping[str, StoredTensor], name: str, part: HeadLayer, eps: float) -> PoolingLinear:
    norm = None
    if part.norm and (scale := _find_linear(tensors, part.norm)):
        norm = HeadNormWeights(read_tensor(tensors, f"{scale}.weight"), read_optional(tensors, f"{scale}.bias"), eps)
    weight = read_tensor(tensors, f"{name}.weight")
    if weight.ndim != 2:
        raise ValueError(f"{name}.weight has the shape {weight.shape}, and a head's is [outputs, inputs]")
    return PoolingLinear(weight, read_optional(tensors, f"{name}.bias"), part.activation, norm, source=name)


def read_optional(tensors: Mapping[str, StoredTensor], name: str) -> FloatRows | None:
    """Like read(); None if the tensor does not exist."""
    return read_tensor(tensors, name) if name in tensors else None


def read_tensor(tensors: Mapping[str, StoredTensor], name: str, rows: Sequence[int] | None = None) -> FloatRows:
    """A tensor in float32, or some of its rows. ValueError where it is not there, or is no floats."""
    entry = tensors.get(name)
    if entry is None or entry.read is None:
        raise ValueError(f"the files lack {name}; fetch the model anew")
    tensor = entry.read()
    if not tensor.is_floating_point():
        raise ValueError(f"{name} is kept in {tensor.dtype}, and heads are floats; use the model's original")
    out: FloatRows = (tensor if rows is None else tensor[list(rows)]).float().numpy()
    return out


def colbert_projection(tensors: Mapping[str, StoredTensor]) -> PoolingLinear:
    """Returns the projection of token embeddings that a ColBERT keeps among the model's tensors, as vLLM reads it."""
    name = next(
        (name for name in ("linear", "colbert_linear", "embedding_proj_layer") if f"{name}.weight" in tensors), None
    )
    if name is None:
        raise ValueError("the files of this ColBERT hold no linear.weight, its projection; fetch the model anew")
    return _read_linear(tensors, name, HeadLayer(name), 0.0)


def projection(tensors: Mapping[str, StoredTensor], two_layers: bool) -> Head:
    """Returns the projection behind a decoder: one product, or two with a ReLU between (Jina Reranker v3)."""
    if not two_layers:
        return (colbert_projection(tensors),)
    parts = HeadLayer("projector.0", "relu"), HeadLayer("projector.2")
    return tuple(_read_linear(tensors, part.name, part, 0.0) for part in parts)


def masked_lm_head(tensors: Mapping[str, StoredTensor], config: Any) -> Head:
    """Returns BERT's head over the vocabulary; its rows are those of the token embedding where no others are stored."""
    part = HeadLayer("cls.predictions.transform.dense", config.hidden_act, "cls.predictions.transform.LayerNorm")
    decoder = "cls.predictions.decoder"
    names = (f"{decoder}.weight", "bert.embeddings.word_embeddings.weight", "embeddings.word_embeddings.weight")
    table = next((name for name in names if name in tensors), names[0])
    biases = (f"{decoder}.bias", "cls.predictions.bias")
    bias = next((read_tensor(tensors, name) for name in biases if name in tensors), None)
    return _read_linear(tensors, part.name, part, _eps(config)), PoolingLinear(read_tensor(tensors, table), bias)


def read_linear_file(file: Path) -> PoolingLinear:
    """A product that torch.save wrote by itself, its tensors named weight and bias."""
    if not file.is_file():
        raise ValueError(f"{file} is not there, and {file.name} is a head of this model; fetch it")
    opened = TorchFile(file)
    there = {name: StoredTensor(None, (), name=name, read=partial(opened.get_tensor, name)) for name in opened.keys()}
    weight = read_tensor(there, "weight")
    if weight.ndim != 2:
        raise ValueError(f"{file}: weight has the shape {weight.shape}, and a head's is [outputs, inputs]")
    return PoolingLinear(weight, read_optional(there, "bias"))


def between_tokens(table: FloatRows, wanted: Sequence[int], method: str) -> Head:
    """Classes out of a head over the vocabulary: the logits of these tokens, or of the second over the first.

    `table` [tokens, hidden]: the rows of the head for `wanted`, in that order.
    """
    if method == "from_2_way_softmax":
        if len(wanted) != 2:
            raise ValueError(
                f"method='from_2_way_softmax' weighs two tokens, and classifier_from_token names {len(wanted)}"
            )
        return (PoolingLinear(table[1:2] - table[0:1]),)
    return (PoolingLinear(table),)

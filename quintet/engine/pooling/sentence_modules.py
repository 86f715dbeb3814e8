"""Modules of Sentence Transformers behind the pooling, as functions of rows: Dense, LayerNorm, Normalize."""

from collections.abc import Callable, Mapping, Sequence

from quintet.engine.pooling.heads import (
    ACTIVATIONS,
    FloatRows,
    HeadNormWeights,
    PoolingLinear,
    raw_tensors,
    read_optional,
    read_tensor,
    unit_length,
)
from quintet.hub.sentence_transformers import GGUF, SentenceModule
from quintet.interface.weights import StoredTensor
from quintet.model_loader.weight_files import WeightFiles, format_names

RowFunction = Callable[[FloatRows], FloatRows]
_EPSILON = 1e-5  # torch's, of a LayerNorm


def read_modules(modules: Sequence[SentenceModule], width: int) -> tuple[RowFunction, ...]:
    """Returns the modules in order. `width`: numbers of an embedding before them. ValueError names a key or tensor that
    does not fit."""
    functions: list[RowFunction] = []
    for module in modules:
        if module.kind == "Normalize":
            functions.append(unit_length)
            continue
        tensors = _tensors(module)
        if module.kind == "LayerNorm":
            functions.append(_layer_norm(module, tensors, width))
        else:
            dense = _dense(module, tensors, width)
            functions.append(dense)
            width = len(dense.weight)
    return tuple(functions)


def output_width(modules: Sequence[SentenceModule], width: int) -> int:
    """Returns the numbers of an embedding behind the modules, by their configs."""
    sizes = [module.config.get("out_features") for module in modules if module.kind == "Dense"]
    return sizes[-1] if sizes and isinstance(sizes[-1], int) else width


def _tensors(module: SentenceModule) -> Mapping[str, StoredTensor]:
    folder = module.folder
    if module.package == GGUF:
        name = f"{module.config['tensor']}.weight"
        return {"linear.weight": raw_tensors(WeightFiles(folder))[name]}
    return raw_tensors(WeightFiles(folder, "safetensors" if any(folder.glob("*.safetensors")) else "pt"))


def _layer_norm(module: SentenceModule, tensors: Mapping[str, StoredTensor], width: int) -> HeadNormWeights:
    _check_names(module, tensors, {"norm.weight", "norm.bias"})
    norm = HeadNormWeights(read_tensor(tensors, "norm.weight"), read_tensor(tensors, "norm.bias"), _EPSILON)
    if not norm.weight.shape == (width,) == (module.config.get("dimension", width),):
        raise ValueError(f"{module.folder}: the LayerNorm is of {norm.weight.shape[0]} numbers, and gets {width}")
    return norm


def _dense(module: SentenceModule, tensors: Mapping[str, StoredTensor], width: int) -> PoolingLinear:
    folder, config = module.folder, module.config
    full_name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = full_name.rpartition(".")[2].lower()
    if activation not in ACTIVATIONS or not full_name.startswith("torch."):
        raise ValueError(f"{folder}: activation_function is {full_name!r}; of torch's, {', '.join(ACTIVATIONS)} are "
                         "computed here")  # fmt: skip
    adds_input, outputs = bool(config.get("use_residual")), config.get("out_features")
    expected = {"linear.weight", "linear.bias"} if config.get("bias", True) else {"linear.weight"}
    if adds_input and outputs != width:
        expected.add("residual.weight")
    _check_names(module, tensors, expected)
    weight = read_tensor(tensors, "linear.weight")
    if weight.shape != (outputs, width) or config.get("in_features", width) != width:
        raise ValueError(
            f"{folder}: linear.weight has the shape {weight.shape}; the config says {config.get('in_features')} to "
            f"{outputs}, and the module gets {width} numbers"
        )
    bias, residual = read_optional(tensors, "linear.bias"), read_optional(tensors, "residual.weight")
    return PoolingLinear(weight, bias, activation, adds_input=adds_input, residual=residual)


def _check_names(module: SentenceModule, tensors: Mapping[str, StoredTensor], expected: set[str]) -> None:
    if set(tensors) != expected:
        raise ValueError(
            f"{module.folder} holds {format_names(sorted(tensors))}, and a {module.kind} of this config has "
            f"{format_names(sorted(expected))}; fetch the model anew"
        )

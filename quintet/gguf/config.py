"""A GGUF file's metadata as the config.json that the model was published with, in transformers' names."""

from quintet.gguf import defaults
from quintet.gguf.architectures import architecture_of, names_of
from quintet.gguf.architectures.architecture import LAYER_NORM_EPS, RMS_EPS, Entries
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import without_expert_number
from quintet.gguf.pooling import pooling_entries

FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float32"}


def config(model: GGUFModel) -> Entries:
    """Returns the entries of config.json. ValueError names what the file lacks, or what of it is not understood."""
    entries = _shape(model) | pooling_entries(model) | architecture_of(model).entries(model)
    entries |= _tokens(model) | {"dtype": _dtype(model)}
    types = _types(model)
    if types:
        entries["quantization_config"] = {"quant_method": "gguf", "types": types}
    return entries


def _shape(model: GGUFModel) -> Entries:
    architecture = architecture_of(model)
    entries: Entries = {}
    for key, name in architecture.common.items():
        default = model.heads if key == "attention.head_count_kv" else None
        entries[name] = _epsilon(model, key) if key.endswith("epsilon") else model.required_number(key, default)
        if key == "block_count":
            entries[name] -= model.count("nextn_predict_layers")
    entries["model_type"] = architecture.kind if isinstance(architecture.kind, str) else architecture.kind(model)
    entries["vocab_size"] = model.shape(architecture.embedding)[0]
    entries["tie_word_embeddings"] = not model.has("output.weight")
    if architecture.has_head_dim:
        entries["head_dim"] = model.head_dim
        if model.get("attention.value_length", model.head_dim) != model.head_dim:
            raise ValueError(f"{model.path}: keys and values are of different lengths, which quintet does not read")
    return entries


def _epsilon(model: GGUFModel, key: str) -> float:
    """Returns the epsilon of either kind of norm: the converter goes by its name in the original's config."""
    other = LAYER_NORM_EPS if key == RMS_EPS else RMS_EPS
    return model.number(key if model.get(key) is not None or model.get(other) is None else other)


def _tokens(model: GGUFModel) -> Entries:
    """The ids that a text begins, is padded and ends with."""
    entries: Entries = {"bos_token_id": model.metadata.get("tokenizer.ggml.bos_token_id")}
    pad = model.metadata.get("tokenizer.ggml.padding_token_id")
    entries |= {} if pad is None else {"pad_token_id": pad}
    return entries | {"eos_token_id": generation(model)["eos_token_id"] or None}


def generation(model: GGUFModel) -> Entries:
    """Returns the entries of generation_config.json."""
    try:
        return defaults.generation(model.metadata) | architecture_of(model).generation(model)
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from None


def _types(model: GGUFModel) -> dict[str, str]:
    """Returns the GGUF type of each module with a weight that is not in floats."""
    found: dict[str, str] = {}
    names, joined = names_of(model), _joined_types(model)
    for name, (_, each) in model.tensors.items():
        base, _, last = name.rpartition(".")
        if last != "weight" or each.kind.name in FLOATS or names.computed_tensors(name) or names.joined_module(base):
            continue
        for module in names.modules(base):
            if found.setdefault(without_expert_number(module), each.kind.name) != each.kind.name:
                raise ValueError(f"{model.path}: {name} is of another type than the other experts of its layer")
    alike = {module: next(iter(kinds)) for module, kinds in joined.items() if len(kinds) == 1}
    return found | {module: kind for module, kind in alike.items() if kind not in FLOATS}


def encoder_types(mmproj: GGUFModel) -> dict[str, str]:
    """Returns the GGUF types of the products of an encoder's layers that are not in floats."""
    layers = names_of(mmproj).layers
    return {module: kind for module, kind in _types(mmproj).items() if module.startswith(f"{layers}.")}


def _joined_types(model: GGUFModel) -> dict[str, set[str]]:
    """Returns the types of the parts of each module that is made of several; of different types it is dequantized."""
    found: dict[str, set[str]] = {}
    for name, (_, each) in model.tensors.items():
        base, _, last = name.rpartition(".")
        module = names_of(model).joined_module(base)
        if last == "weight" and module is not None:
            found.setdefault(module[0], set()).add(each.kind.name)
    return found


def _dtype(model: GGUFModel) -> str:
    """Returns the first of bfloat16, float16 and float32 that a matrix is in; quantized ones compute in bfloat16."""
    kinds = {each.kind.name for _, each in model.tensors.values() if len(each.shape) > 1}
    wanted = {DTYPES.get(kind, "bfloat16") for kind in kinds}
    one = next((each for each in ("bfloat16", "float16", "float32") if each in wanted), "bfloat16")
    return architecture_of(model).dtype or one

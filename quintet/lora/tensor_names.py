"""Names of tensors in adapters, as PEFT and trainers built on it write them: the module, and the tensor's role."""

from dataclasses import dataclass
from pathlib import Path

from quintet.lora.errors import AdapterError, shown

A, B, BIAS, MAGNITUDE = "lora_A", "lora_B", "lora_B.bias", "lora_magnitude_vector"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
SAVED = "saved"  # a whole tensor of the base model
BASE_LAYER = ".base_layer"  # behind a module of several parameters that have LoRA (target_parameters)
BASE_COPY = "base copy"  # the same, which was not trained: of an embedding that has LoRA, or was enlarged
UNUSED = "unused"  # a copy of what modules_to_save replaced

# Modules that torch.compile, FSDP and activation checkpointing put around others.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class TensorRole:
    """A tensor of an adapter: `name` is the module's path in the base model, or the tensor's if it is a whole one."""

    name: str
    role: str


def role_of(raw: str, file: Path) -> TensorRole:
    """Returns a tensor's module and role. AdapterError names a tensor that is not LoRA's.

    `base_model.model.` is cut, as are wrappers of modules; an adapter's name (`.default`) may be there or not.
    """
    parts = [part for part in raw.split(".") if part not in _WRAPPERS]
    if parts[:2] == ["module", "base_model"]:  # DistributedDataParallel's
        parts = parts[1:]
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    if "" in parts or not parts:
        raise AdapterError(file, f"tensor {shown(raw)} has an empty part in its name; save the adapter with PEFT")
    for at, part in enumerate(parts):
        if part.startswith("lora_") or part == "lora":
            return _lora(raw, parts[:at], part, parts[at + 1 :], file)
        if part.startswith(("trainable_tokens_", "token_adapter")):
            raise AdapterError(
                file, f"tensor {shown(raw)} holds trained rows of the token embedding (trainable_token_indices), which "
                "are not supported; merge the adapter into its base model with PEFT",
            )  # fmt: skip
    for at, part in enumerate(parts):
        before, after = parts[:at], parts[at + 1 :]
        if part == "original_module":
            return TensorRole(".".join(before + after), UNUSED)
        if part == "modules_to_save" and after:
            return TensorRole(".".join(before + (after[1:] or after)), SAVED)
        if part == "base_layer" and after:  # biases of base layers are trained with bias="all" and "lora_only"
            return TensorRole(".".join(before + after), SAVED if after == ["bias"] else BASE_COPY)
    return TensorRole(".".join(parts), SAVED)


def _lora(raw: str, module: list[str], kind: str, rest: list[str], file: Path) -> TensorRole:
    """`rest` follows lora_A and the like: the adapter's name or none, then weight or bias."""
    path = ".".join(module)
    last, count = rest[-1:], len(rest)
    role = ""
    if kind in (A, B) and count in (1, 2) and last == ["weight"]:
        role = kind
    elif kind == B and count in (1, 2) and last == ["bias"]:
        role = BIAS
    elif kind in (EMBEDDING_A, EMBEDDING_B) and count <= 1:
        role = kind
    elif kind == MAGNITUDE and (count <= 1 or (count == 2 and last == ["weight"])):
        role = kind
    if not role or not path:
        raise AdapterError(
            file, f"tensor {shown(raw)} has no name of PEFT's LoRA (MODULE.lora_A.weight and the like); convert the "
            "adapter to PEFT's names",
        )  # fmt: skip
    return TensorRole(path, role)

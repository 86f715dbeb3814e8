"""Decodes prompt_embeds of a request: base64 of safetensors, or of a torch.save file."""

import base64
import binascii
import io
import zipfile
from typing import Any

from quintet.chat.prompts import Prompt, check_enabled, embeds_prompt
from quintet.engine.processes.model_info import ModelInfo

_SLACK = 1 << 16  # bytes of a file besides its tensor data
_FORMATS_TEXT = "base64 of safetensors with one tensor, or of what torch.save writes of one"


def read_embeds(text: Any, served: ModelInfo, name: str, salt: str | None) -> Prompt:
    """Decodes prompt embeddings. Raises ValueError if invalid; too large ones are refused before decoding."""
    width = served.embeds_width
    check_enabled(width, name)
    most = 4 * width * served.max_model_len + _SLACK
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} must be {_FORMATS_TEXT}, not {type(text).__name__}{' without text' * (text == '')}")
    if len(text) > 4 * -(-most // 3):
        raise ValueError(
            f"{name} has {len(text)} characters, and no more than {4 * -(-most // 3)} hold the model's "
            f"{served.max_model_len} tokens of {width} numbers; shorten the prompt"
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} is not base64: {error}") from None
    tensor = _torch_file(data, most, name) if data.startswith(b"PK") else _safetensors(data, name)
    return embeds_prompt(tensor, width, name, salt)


def _safetensors(data: bytes, name: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{name} must be {_FORMATS_TEXT}: {error}") from None
    if len(tensors) != 1:
        raise ValueError(f"{name} must be {_FORMATS_TEXT}: this one has {len(tensors)} tensors")
    return next(iter(tensors.values()))


def _torch_file(data: bytes, most: int, name: str) -> Any:
    """Loads a torch file with one tensor. weights_only makes torch rebuild only tensors and run no code of the file."""
    import torch

    held = _largest_entry(data, most, name)
    try:
        made = torch.load(io.BytesIO(data), map_location=_keep_on_host, weights_only=True)
    except Exception as error:  # torch's reader raises many types for a damaged file
        raise ValueError(f"{name} cannot be read as a file of torch's: {str(error)[:200]}") from None
    if type(made) is not torch.Tensor or made.layout is not torch.strided or made.is_meta:
        raise ValueError(f"{name} must be one dense tensor, not {type(made).__name__}")
    # torch allocates the storage size that the file declares, and strides may repeat the same numbers
    if max(made.untyped_storage().nbytes(), made.numel() * made.element_size()) > held:
        raise ValueError(f"{name} says that its tensor is larger than the file")
    return made


def _keep_on_host(storage: Any, location: str) -> Any:
    """Keeps the storage on the host, for any device that the file names."""
    return storage


def _largest_entry(data: bytes, most: int, name: str) -> int:
    """Returns bytes of the largest data entry. Refuses compressed entries: they could expand without limit."""
    try:
        entries = zipfile.ZipFile(io.BytesIO(data)).infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{name} cannot be read as a file of torch's: {error}") from None
    sizes = [entry.file_size for entry in entries]
    if sum(sizes) > most or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError(f"{name} is an archive that is compressed, or too large; give what torch.save writes")
    return max((entry.file_size for entry in entries if "/data/" in entry.filename), default=0)

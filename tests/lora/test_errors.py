"""Errors for callers of a server name no folder of its machine, and all that the caller has to know."""

import errno
from pathlib import Path

import pytest

from quintet.lora.adapter import LoRABounds, adapter_digest, read_adapter
from quintet.lora.errors import AdapterError, public_text

FOLDER = Path("/srv/adapters/sql")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (AdapterError(FOLDER, "has rank 9; raise max_lora_rank"), "has rank 9; raise max_lora_rank"),
        (AdapterError(FOLDER / "adapter_model.safetensors", "is cut"), "adapter_model.safetensors: is cut"),
        (AdapterError("model.layers.0", "the adapter changes it"), "model.layers.0: the adapter changes it"),
        (PermissionError(errno.EACCES, "Permission denied", "/srv/a/x.json"), "x.json: Permission denied"),
        (ValueError("other"), "other"),
        (KeyError(), "KeyError"),
    ],
)
def test_texts(error: Exception, text: str) -> None:
    assert public_text(error) == text


def test_a_broken_file_is_named_without_its_folder(tmp_path: Path) -> None:
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    weights.write_text("x")
    for content, named in (("[", config.name), ('{"peft_type": "LORA", "r": 1}', weights.name)):
        config.write_text(content)
        for read in (adapter_digest, lambda folder: read_adapter(folder, LoRABounds(1))):
            with pytest.raises(AdapterError) as caught:
                read(tmp_path)
            assert str(tmp_path) in str(caught.value)
            assert named in public_text(caught.value) and str(tmp_path) not in public_text(caught.value)

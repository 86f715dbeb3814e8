"""Architectures of GGUF files: one row each, of a family here and the names of its tensors. Files hold near ones."""

from collections.abc import Mapping

from quintet.common.suggestions import nearest_name
from quintet.gguf.architectures import dense, encoders, gemma, gpt, hybrid, llama, mixtures, qwen, whisper
from quintet.gguf.architectures.architecture import Architecture
from quintet.gguf.mmproj import projector_of
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames

ARCHITECTURES: Mapping[str, Architecture] = {
    **dense.ARCHITECTURES,
    **encoders.ARCHITECTURES,
    **gemma.ARCHITECTURES,
    **gpt.ARCHITECTURES,
    **hybrid.ARCHITECTURES,
    **llama.ARCHITECTURES,
    **mixtures.ARCHITECTURES,
    **qwen.ARCHITECTURES,
    **whisper.ARCHITECTURES,
}


def architecture_of(model: GGUFModel) -> Architecture:
    """Returns the row of a model's architecture. ValueError, with the nearest that is known, if there is none."""
    found = ARCHITECTURES.get(model.prefix)
    if found is not None:
        return found
    if model.is_mmproj:
        raise ValueError(
            f"{model.path} holds the encoder of images or audio of a model (mmproj), and no language model; give the "
            "model's own file, which lies beside it, as the model, and this one as mmproj"
        )
    match = nearest_name(model.prefix, ARCHITECTURES)
    nearest = f" (the nearest is {match!r})" if match else ""
    raise ValueError(
        f"{model.path} is of architecture {model.prefix[:60]!r}, which quintet does not read from GGUF{nearest}; it "
        f"reads {', '.join(sorted(ARCHITECTURES))}: use the model's original files, if its family is supported"
    )


def names_of(model: GGUFModel) -> ArchitectureNames:
    """Returns the names of the tensors of a model's files."""
    names = projector_of(model).names if model.is_mmproj else architecture_of(model).names
    return names if isinstance(names, ArchitectureNames) else names(model)

"""Processor of a GGUF model's pictures, from the metadata of its two files alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quintet.gguf.file import read, read_metadata
from quintet.gguf.mmproj import projector_of
from quintet.gguf.mmproj.projector import Projector
from quintet.gguf.model import GGUFModel
from quintet.gguf.tokenizer import backend, special_tokens
from quintet.gguf.vocabulary import read_vocabulary
from quintet.media.families import MediaModel
from quintet.media.kinds import IMAGE
from quintet.media.processors.parts import ATTRIBUTES, with_own_parts


def load_gguf_processor(model: MediaModel, find_class: Callable[[str], Any]) -> Any:
    """Returns transformers' processor of a GGUF model. `find_class`: by name. ValueError says what the files lack."""
    import transformers

    mmproj = GGUFModel([read(Path(model.mmproj))])
    projector = projector_of(mmproj)
    images, settings = projector.processor_settings(mmproj)
    parts = {
        ATTRIBUTES[IMAGE]: getattr(transformers, projector.image_processor)(**images),
        "tokenizer": _tokenizer(Path(model.folder), projector),
    }
    made = with_own_parts(find_class(projector.processor))
    return made(*[parts.get(name) for name in made.get_attributes()], **settings)


def _tokenizer(file: Path, projector: Projector) -> Any:
    """Returns transformers' tokenizer of a model's file, in which the tokens that stand for pictures are special."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    vocabulary = read_vocabulary(read_metadata(file))
    words = set(vocabulary.tokens)
    tokens = {entry: next(each for each in names if each in words) for entry, names in projector.tokens.items()}
    named = {name: tokens.get(entry, entry) for name, entry in projector.named.items()} | special_tokens(vocabulary)
    made = PreTrainedTokenizerFast(tokenizer_object=backend(vocabulary), clean_up_tokenization_spaces=False, **named)
    made.add_tokens([AddedToken(each, special=True, normalized=False) for each in tokens.values()])
    return made

"""Updates of families whose modules' tensors are made of several of the files', or whose files have stacks of them."""

from collections.abc import Mapping
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from quintet_tools.checkpoints.tiny import Tiny, make, variants
from tests.helpers.platforms.engines import answers, engine


def tensors_of(tiny: Tiny) -> dict[str, Tensor]:
    found = {}
    for file in sorted(tiny.folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def checkpoints(family: str) -> tuple[Tiny, Tiny]:
    """Two checkpoints of the family's first settings, with different weights."""
    settings: Mapping[str, Any] = next(iter(variants(family).values()))
    return make(family, settings), make(family, settings, 1)


@pytest.mark.parametrize(
    ("family", "files"),
    [
        ("bailing_moe", "query_key_value"),  # gathered: experts, and a fused product that is normalized by head
        ("baichuan", "W_pack"),  # gathered: one tensor for q, k and v
        ("phi3", "qkv_proj"),  # one tensor that is cut into shares
        ("gpt_oss", "experts.gate_up_proj"),  # a stack of experts, two products in each
        ("ernie4_5_moe", "experts"),
    ],
)
def test_an_update_gives_what_a_fresh_engine_gives(family: str, files: str) -> None:
    old, new = checkpoints(family)
    tensors = tensors_of(new)
    assert any(files in name for name in tensors), "the files are of the layout that this is about"
    with engine(old) as llm, engine(new) as fresh:
        before, want = answers(llm), answers(fresh)
        assert before != want
        llm.update_weights(reversed(list(tensors.items())))
        assert answers(llm) == want
        llm.update_weights(tensors_of(old))
        assert answers(llm) == before


@pytest.mark.parametrize("family", ["bailing_moe", "phi3"])
def test_what_never_came_is_named(family: str) -> None:
    old, new = checkpoints(family)
    tensors = tensors_of(new)
    name = next(each for each in tensors if "o_proj" in each or "attention.dense" in each)
    del tensors[name]
    with engine(old) as llm:
        with pytest.raises(ValueError, match=r"layers\.0\..* never came"):
            llm.update_weights(tensors)

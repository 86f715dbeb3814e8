"""Large imports look for no garbage, and leave a program's own settings as they were."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quintet.common.imports import without_garbage_collection


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.unfreeze()  # what pytest collected
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_within_and_what_was_made_is_old() -> None:
    with without_garbage_collection():
        assert not gc.isenabled()
        made = [[] for _ in range(10_000)]
    assert gc.isenabled() and not gc.get_freeze_count()
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in old for each in made)


def test_collection_comes_back_after_a_failure() -> None:
    with pytest.raises(ImportError), without_garbage_collection():
        raise ImportError
    assert gc.isenabled()


def test_who_collects_by_hand_goes_on_so() -> None:
    gc.disable()
    with without_garbage_collection():
        pass
    assert not gc.isenabled()


def test_what_was_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with without_garbage_collection():
        pass
    assert (
        gc.get_freeze_count() > count / 2 and gc.isenabled()
    )  # a few may have ended meanwhile; none is left if it thaws


@pytest.mark.slow
def test_a_model_of_numbers_is_loaded_without_jinja() -> None:
    """In a process of its own: the renderer of chat templates takes 40 ms to import."""
    code = (
        "import gc, sys\nfrom quintet import LLM\nLLM('bundled-embed', device='cpu', use_tqdm=False).embed(['a'])\n"
        "print(gc.isenabled(), 'torch' in sys.modules, [name for name in ('jinja2', 'transformers', 'jsonschema', "
        "'pydantic', 'huggingface_hub', 'sympy', 'torch._dynamo', 'torch._inductor') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "True True []"


def test_a_command_ends_without_a_last_look_for_garbage() -> None:
    """What is registered first runs last."""
    code = (
        "import atexit, gc\natexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from quintet.cli import main as cli\ncli.main(['--version'])\nassert not gc.get_freeze_count()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["True"]

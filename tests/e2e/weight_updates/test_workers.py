"""Methods of workers that a trainer's package brings, and functions of the caller, in one process and in several."""

from typing import Any

import pytest
import torch

from quintet_tools.checkpoints.tiny import make
from tests.e2e.weight_updates.test_updates import NORM, SIZES, tensors_of
from tests.helpers.platforms.engines import answers, engine

EXTENSION = "tests.helpers.worker_extension.Extension"


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=repr)
def test_methods_of_an_extension_run_on_every_rank(settings: dict[str, Any]) -> None:
    tiny = make("llama", SIZES)
    count = max([1, *settings.values()])
    ranks = range(count) if "tensor_parallel_size" in settings else [0] * count
    with engine(tiny, worker_extension_cls=EXTENSION, **settings) as llm:
        before = answers(llm)
        assert llm.collective_rpc("where", kwargs={"more": 3}) == [[rank, 3] for rank in ranks]
        with pytest.raises((RuntimeError, ValueError), match="the communicator is not there"):
            llm.collective_rpc("fails")
        with pytest.raises(ValueError, match="workers have no method 'nowhere'"):
            llm.collective_rpc("nowhere")
        with pytest.raises(ValueError, match="no method '_load'"):
            llm.collective_rpc("_load")
        llm.collective_rpc("update_named_param", args=(NORM, [128], 0.25))
        changed = answers(llm)
        assert changed != before
        llm.update_weights({NORM: torch.full((128,), 0.25)}, partial=True)
        assert answers(llm) == changed, "both ways write the same"
        llm.update_weights(tensors_of(tiny))
        assert answers(llm) == before


def test_functions_of_the_caller_run_where_ranks_are_in_its_process() -> None:
    with engine(make("llama", SIZES)) as llm:
        assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
        assert llm.collective_rpc(lambda view, more: view.rank + more, args=(5,)) == [5]
        with pytest.raises(ValueError, match="method is a name or a function, not a int"):
            llm.collective_rpc(3)


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("nowhere.Extension", "cannot be imported"),
        ("tests.helpers.worker_extension.Missing", "is no class"),
        ("tests.helpers.worker_extension.Clashes", "has load_weights, which workers have too"),
    ],
)
def test_an_extension_that_cannot_serve_is_refused_by_its_name(path: str, match: str) -> None:
    with engine(make("llama", SIZES), worker_extension_cls=path) as llm:
        with pytest.raises(ValueError, match=match):
            llm.collective_rpc("where")

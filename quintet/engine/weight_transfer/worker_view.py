"""Workers as code of the caller sees them: what collective_rpc() and apply_model() call."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quintet.model_loader.incoming import weight_checksums

if TYPE_CHECKING:
    from quintet.engine.executor.worker import Worker
    from quintet.engine.weight_transfer.controls import Controls

Load = Callable[[Iterable[tuple[str, Tensor]]], None]

# what extensions of trainers for vLLM read of a worker and its model, and is not there -> what does it
_REMEDIES = {
    "add_lora": "adapters are the engine's; call add_lora() of LLM or AsyncLLM; a LoRARequest may have tensors "
    "from memory",
    "remove_lora": "adapters are the engine's; call remove_lora() of LLM or AsyncLLM",
    "vllm_config": "settings are llm.config; weights that come as floats are quantized as at the start",
    "compute_logits": "logits are changed by logits processors, LLM(logits_processors=[...])",
    "execute_model": "a step is the engine's; call generate()",
}


def _no_attribute(owner: str, name: str) -> AttributeError:
    remedy = f": {_REMEDIES[name]}" if name in _REMEDIES else ""
    return AttributeError(f"{owner} has no {name}{remedy}")


class ModelView:
    """A worker's model, with vLLM's load_weights()."""

    def __init__(self, model: nn.Module, load: Load) -> None:
        self._model, self._load = model, load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Writes tensors by checkpoint name, as WorkerView.load_weights() does -> their names."""
        names = set[str]()

        def named() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                names.add(name)
                yield name, tensor

        self._load(named())
        return names

    def __getattr__(self, name: str) -> Any:
        if name in _REMEDIES:
            raise AttributeError(f"the model of a worker has no {name}: {_REMEDIES[name]}")
        return getattr(self._model, name)


class RunnerView:
    """A worker's model runner, as extensions see it."""

    def __init__(self, model: ModelView, model_config: Any) -> None:
        self.model, self.model_config = model, model_config

    def __getattr__(self, name: str) -> Any:
        raise _no_attribute("the model runner of a worker", name)


class WorkerView:
    """One rank's worker: attributes that vLLM's extensions of workers read, and the methods of the engine's extension.

    An extension is a class of an installed package (worker_extension_cls). Its methods are called by name, with this
    object as self.
    """

    rank: int  # among all ranks of the engine
    local_rank: int  # the same: ranks of several machines count on
    device: torch.device
    model_config: Any  # .dtype and .max_model_len
    model_runner: Any  # .model is as below

    def __init__(self, worker: "Worker", controls: "Controls") -> None:
        self.rank = self.local_rank = worker.rank_info.rank
        self.world_size = worker.rank_info.size
        self.device = next((each.device for each in worker.model.parameters()), torch.empty(0).device)
        self._module = worker.model
        self._encoders = [part.model for part in (worker.encoder, worker.tower) if part is not None]  # of media
        self._load: Load = lambda tensors: controls.load(worker, tensors)
        build = worker.main.build
        self.model_config = SimpleNamespace(dtype=build.dtype, max_model_len=build.max_model_len)
        self.model_runner = RunnerView(ModelView(worker.model, self._load), self.model_config)

    @classmethod
    def of(cls, worker: "Worker", controls: "Controls", extension: str | None) -> "WorkerView":
        """Returns the view of a worker with the methods of its extension. ValueError: it cannot be imported, or has an
        attribute that the view has as well."""
        kind: Any = cls if extension is None else type("ExtendedWorkerView", (cls, load_extension(extension)), {})
        view: WorkerView = kind.__new__(kind)  # extensions may have a __new__() without arguments
        kind.__init__(view, worker, controls)
        return view

    def __getattr__(self, name: str) -> Any:
        raise _no_attribute("a worker", name)

    def get_model(self) -> nn.Module:
        """Returns the rank's part of the model. Its parameters are laid out for the device's products."""
        return self._module

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes tensors by checkpoint name. Tensors of one weight (q, k and v) may come in several calls; requests are
        refused until all are there."""
        self._load(weights)

    def weight_checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of each weight, by layer and attribute; of the encoders of media, too."""
        found: dict[str, str] = {}
        for model in (self._module, *self._encoders):
            found |= weight_checksums(model)
        return found

    def check_health(self) -> None:
        """Does nothing: a worker that answers is well."""


RESERVED = frozenset(
    ("rank", "local_rank", "world_size", "device", "model_config", "model_runner", "get_model", "load_weights")
    + ("weight_checksums",)
)


def load_extension(path: str) -> type:
    """Imports worker_extension_cls, "package.module.Class" or "package.module:Class". ValueError says why it cannot
    be."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError as error:
        raise ValueError(f"worker_extension_cls={path!r} cannot be imported ({error}); install its package") from None
    if not isinstance(found, type):
        raise ValueError(f"worker_extension_cls={path!r} is no class; give package.module.Class")
    taken = sorted(RESERVED & set(vars(found)))
    if taken:
        raise ValueError(f"worker_extension_cls={path!r} has {', '.join(taken)}, which workers have too; rename it")
    return found


def call_method(
    view: WorkerView, method: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Calls a method of a worker by name, or a function of the view. ValueError: there is no such method."""
    if callable(method):
        return method(view, *args, **(kwargs or {}))
    found = None if str(method).startswith("_") else getattr(view, str(method), None)
    if not callable(found):
        raise ValueError(
            f"collective_rpc: workers have no method {repr(method)[:80]}; name one of the class that "
            "worker_extension_cls gives"
        )
    return found(*args, **(kwargs or {}))

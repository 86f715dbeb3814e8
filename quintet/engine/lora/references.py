"""Adapters by the names that callers give them: finds their files, and tells them apart by what these hold."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from quintet.config import EngineConfig
from quintet.engine.lora.manager import LoRAManager
from quintet.engine.lora.written import WrittenAdapters
from quintet.lora.adapter import adapter_digest
from quintet.lora.request import LoRAReference, LoRARequest
from quintet.sampling_params import ParameterError

FindFolder = Callable[[str], Path]  # a path or a hub id -> the folder
AgreeOnFiles = Callable[[LoRAReference, str], str]  # an adapter, why this rank cannot read it -> why none serves it


class NamedAdapter:
    """An adapter that a caller has named, and the number that vLLM's calls know it by."""

    def __init__(self, request: LoRARequest, number: int, reference: LoRAReference) -> None:
        self.request, self.number, self.reference = request, number, reference


class LoRAReferences:
    """Adapters of one client. Any thread may call it."""

    def __init__(
        self, config: EngineConfig, find: FindFolder, manager: LoRAManager | None, agree: AgreeOnFiles | None = None
    ) -> None:
        """`manager`: the engine's, where that is in this process; it finds at once what is wrong with an adapter.
        `agree`: where each rank gets the same calls."""
        self._enabled, self._find, self._manager, self._agree = config.enable_lora, find, manager, agree
        self._named: dict[str, NamedAdapter] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._written = WrittenAdapters()
        self._num_naming = 0  # calls of reference() that are under way: files that they have written are not deleted

    def reference(self, request: LoRARequest) -> LoRAReference:
        """Returns an adapter as requests carry it, once the engine has read it. ValueError or OSError says what is
        wrong with it."""
        self._check(request)
        with self._lock:
            self._num_naming += 1
        try:
            return self._name(request, self._readable(request.lora_name, lambda: self._folder(request)))
        finally:
            with self._lock:
                self._num_naming -= 1
            self._delete_unnamed()

    def _name(self, request: LoRARequest, reference: LoRAReference) -> LoRAReference:
        with self._lock:
            known = self._named.get(request.lora_name)
            if known is None or known.reference != reference or request.lora_int_id not in (0, known.number):
                number = request.lora_int_id or (known.number if known is not None else self._free_number())
                self._named[request.lora_name] = NamedAdapter(request, number, replace(reference, number=number))
            return self._named[request.lora_name].reference

    def _readable(self, name: str, find: Callable[[], Path]) -> LoRAReference:
        """Returns an adapter that the engine has read, on all ranks where these get the same calls."""
        reference, why, error = LoRAReference(name, "", b""), "", None
        try:
            folder = find()
            reference = LoRAReference(name, str(folder), self._digest(folder))
            why = "" if self._manager is None else self._manager.check(reference)
        except Exception as caught:  # the others wait for what this rank has found
            if self._agree is None:
                raise
            why, error = str(caught) or type(caught).__name__, caught
        agreed = why if self._agree is None else self._agree(reference, why)
        if agreed and self._manager is not None:
            self._manager.forget(reference.digest)
        if error is not None and agreed == why:
            raise error
        if agreed:
            raise ValueError(f"the adapter {name!r} cannot be served: {agreed}")
        return reference

    def _digest(self, folder: Path) -> bytes:
        return adapter_digest(folder) if self._manager is None else self._manager.digests.of(folder)

    def _free_number(self) -> int:
        used = {each.number for each in self._named.values()}
        return next(number for number in self._numbers if number not in used)

    def _check(self, request: LoRARequest) -> None:
        if not isinstance(request, LoRARequest):
            raise ParameterError("lora_request", f"is a LoRARequest, not {type(request).__name__}")
        if not self._enabled:
            raise ParameterError("lora_request", "needs enable_lora=True when the engine is started")
        if not request.lora_name or not isinstance(request.lora_name, str):
            raise ParameterError("lora_request", "needs a lora_name")
        if not request.lora_path and request.lora_tensors is None:
            raise ParameterError("lora_request", "needs a lora_path, or lora_tensors and peft_config")
        if request.lora_tensors is not None and request.peft_config is None:
            raise ParameterError("lora_request", "has lora_tensors and no peft_config; give both")

    def _folder(self, request: LoRARequest) -> Path:
        if request.lora_tensors is None:
            return self._find(request.lora_path)
        assert request.peft_config is not None
        return self._written.write(request.peft_config, request.lora_tensors)

    def _delete_unnamed(self) -> None:
        """Deletes the files of adapters that came as tensors and have no name any more, once no request has them. Other
        processes may have requests with them: where the engine is not in this one, they stay until the end."""
        if self._manager is None:
            return
        for digest in self._written.digests:
            with self._lock:
                is_used = self._num_naming > 0 or self._has_name(digest)
            if not is_used:
                self._manager.remove(digest, partial(self._delete, digest))

    def _delete(self, digest: bytes) -> None:
        with self._lock:
            if not self._num_naming and not self._has_name(digest):
                self._written.delete(digest)

    def _has_name(self, digest: bytes) -> bool:
        return any(each.reference.digest == digest for each in self._named.values())

    def numbers(self) -> set[int]:
        """Returns the numbers of the adapters that were named here."""
        with self._lock:
            return {each.number for each in self._named.values()}

    def remove(self, adapter: int | str) -> bool:
        """Forgets an adapter, by its number or name -> whether it was there. Requests that have it go on."""
        with self._lock:
            found = self._find_named(adapter)
            if found is None:
                return False
            del self._named[found.reference.name]
            digest = found.reference.digest
            is_last = not self._has_name(digest)
        if self._manager is not None and is_last:
            self._manager.remove(digest, partial(self._delete, digest))
        return True

    def pin(self, adapter: int | str) -> bool:
        """Keeps an adapter in host memory and in its slot. ValueError if it is not known, or no slot would be left."""
        with self._lock:
            found = self._find_named(adapter)
        if found is None or self._manager is None:
            raise ValueError(f"adapter {adapter!r} is not loaded in this process; call add_lora() first")
        reference = self._readable(found.reference.name, lambda: Path(found.reference.path))
        self._manager.pin(reference.digest)
        return True

    def _find_named(self, adapter: int | str) -> NamedAdapter | None:
        if isinstance(adapter, str):
            return self._named.get(adapter)
        return next((each for each in self._named.values() if each.number == adapter), None)

    def close(self) -> None:
        """Deletes the files of adapters that came as tensors."""
        self._written.close()

"""Ollama's lists of models, of a server of several models: /api/tags, /api/ps and /api/version."""

import hashlib
from datetime import datetime, timedelta, timezone

from quintet.router.models.core import ModelsCore, ModelStatus
from quintet.router.models.planner import ModelState
from quintet.server.http.ollama.models import API_VERSION, FOREVER, listed_name
from quintet.server.http.ollama.protocol import Details, ModelEntries, ModelEntry, Version


def version(core: ModelsCore) -> Version:
    """Returns the version of Ollama's API that the engines follow."""
    return Version(API_VERSION)


def tags(core: ModelsCore) -> ModelEntries:
    """Returns all models, loaded or not. A model's size is the memory that its engine is planned to take."""
    entries = []
    for status in core.statuses():
        entry = _entry(status)
        entry.modified_at = _timestamp(datetime.fromtimestamp(status.created, timezone.utc))
        entries.append(entry)
    return ModelEntries(entries)


def running(core: ModelsCore) -> ModelEntries:
    """Returns the models that are loaded, with the time at which each will be unloaded."""
    entries = []
    for status in core.statuses():
        if status.state is ModelState.LOADED:
            entry = _entry(status)
            entry.context_length = status.max_model_len
            left = None if status.expires is None else timedelta(seconds=status.expires)
            entry.expires_at = FOREVER if left is None else _timestamp(datetime.now(timezone.utc) + left)
            entries.append(entry)
    return ModelEntries(entries)


def _entry(status: ModelStatus) -> ModelEntry:
    name, form = listed_name(status.name), "gguf" if ".gguf" in status.path.lower() else "safetensors"
    digest = hashlib.sha256(status.path.encode()).hexdigest()
    details = Details(format=form, family="", families=[])
    return ModelEntry(name=name, model=name, size=status.memory, digest=digest, details=details)


def _timestamp(time: datetime) -> str:
    """RFC 3339."""
    return time.isoformat().replace("+00:00", "Z")

"""Downloads files from the Hugging Face hub or its cache; errors say what to do."""

import contextlib
import dataclasses
import glob
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from quintet.common.suggestions import nearest_name
from quintet.config import BUNDLED, BUNDLED_EMBED, INSIDE, EngineConfig, Environment
from quintet.hub import modelscope
from quintet.hub.modelscope import ModelScopeRequest

# The same weights once more in other layouts, which would double the download.
COPIES = ("consolidated*", "*/*.safetensors")
_COMMIT = re.compile("[0-9a-f]{40}")
_HUB_TIMEOUT = 10.0  # seconds without an answer to the list of a model's files


def download(
    name: str,
    revision: str | None,
    config: EngineConfig,
    patterns: Iterable[str],
    environment: Environment,
    remedy: str | None = None,
) -> Path:
    """The folder of a hub id with the files that match. OSError says why there is none, and what to do: `remedy`, or
    what helps where a model is missing."""
    ignored = [*(COPIES if config.load_format != "mistral" else ()), *config.ignore_patterns]
    if environment.use_modelscope:
        return modelscope.download(
            ModelScopeRequest(name, revision), config, (list(patterns), ignored), environment.hf_hub_offline
        )
    from huggingface_hub import snapshot_download

    with _list_hub_files(name, revision, config, environment, remedy):
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=config.download_dir,
                token=config.hf_token,
                allow_patterns=list(patterns),
                ignore_patterns=ignored,
                local_files_only=environment.hf_hub_offline,
            )
        )


def exact_patterns(names: Iterable[str]) -> list[str]:
    """Patterns that match these names alone."""
    return [glob.escape(name) for name in names]


def list_files(name: str, revision: str | None, config: EngineConfig, environment: Environment) -> list[str]:
    """The files of a hub id, by their paths: on the hub, or in its cache where the hub is not to be asked."""
    if environment.use_modelscope:
        return modelscope.list_files(ModelScopeRequest(name, revision))
    from huggingface_hub import HfApi

    if environment.hf_hub_offline:
        try:
            folder = download(name, revision, config, ("*",), environment)
        except ConnectionError:  # perhaps some of the files are there
            if (found := _cached_snapshot(name, revision, config)) is None:
                raise
            folder = found
        return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())
    try:
        with _list_hub_files(name, revision, config, environment):
            # one request: list_repo_files() repeats a failed one for 25 s
            listed = HfApi(token=config.hf_token).model_info(name, revision=revision, timeout=_HUB_TIMEOUT)
            return sorted(each.rfilename for each in listed.siblings or ())
    except ConnectionError:
        with contextlib.suppress(OSError):
            return list_files(name, revision, config, dataclasses.replace(environment, hf_hub_offline=True))
        raise


def _cached_snapshot(name: str, revision: str | None, config: EngineConfig) -> Path | None:
    """Returns the folder of a revision in the hub's cache, also where only some of its files were downloaded."""
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = Path(config.download_dir or HF_HUB_CACHE).expanduser() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision or ""
    folder = repository / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


@contextlib.contextmanager
def _list_hub_files(
    name: str, revision: str | None, config: EngineConfig, environment: Environment, remedy: str | None = None
) -> Iterator[None]:
    near = None if remedy else nearest_name(name, INSIDE)
    hint, remedy = f" (did you mean {near!r}?)" if near else "", remedy or _remedy(config)
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        yield
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"model {name!r} is gated: accept its terms at https://huggingface.co/{name}, then give a token "
            "(`hf auth login`, HF_TOKEN or hf_token)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"model {name!r} has no revision {revision!r}; see its branches and tags") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no folder {name!r} here, and the hub knows no such model, or it is private: check the spelling{hint}, or "
            "give a token that may read it (`hf auth login`, HF_TOKEN or hf_token)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ConnectionError(_not_cached(name + at, config, environment, remedy)) from error
    except errors.HfHubHTTPError as error:
        raise ConnectionError(f"the hub refused {name!r}{at}: {error}") from error
    except (OSError, RuntimeError) + _transport_errors() as error:  # no route, no disk space, a broken transfer
        why = str(error) or type(error).__name__
        raise ConnectionError(
            f"cannot download {name!r}{at} from the hub: {why}; check the network, or {remedy}"
        ) from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """Returns the base classes of the errors of the HTTP library that the hub's client uses: no OSErrors."""
    return tuple(sys.modules[name].HTTPError for name in ("httpx", "httpx2") if name in sys.modules)


def _not_cached(what: str, config: EngineConfig, environment: Environment, remedy: str) -> str:
    where = config.download_dir or environment.hf_home or "the hub's cache"
    if environment.hf_hub_offline:
        return f"{what} is not in {where} and HF_HUB_OFFLINE is set; unset it to download, or {remedy}"
    return f"{what} is not in {where} and the hub cannot be reached; {remedy}"


def _remedy(config: EngineConfig) -> str:
    inside = nearest_name(config.model, INSIDE) or (BUNDLED_EMBED if config.runner == "pooling" else BUNDLED)
    return "give a local folder or .gguf file" + ("" if config.model in INSIDE else f" or use the model {inside!r}")

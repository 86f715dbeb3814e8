"""Removes models from the hub's cache and from folders of GGUF files, and nothing outside them."""

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.common.suggestions import unknown_name_error
from quintet.config.cache_dir import cache_folder
from quintet.gguf.file_choice import BESIDE, SHOWN, GGUFQuery, choose, parse_query, quantization_label
from quintet.hub.local_models import (
    cache_root,
    cached_models,
    files_of,
    has_weights,
    model_heads,
    scan_cache,
    split_parts,
)


@dataclass(frozen=True)
class Removal:
    """Files of one model that can be removed."""

    description: str
    size: int  # bytes that this frees
    run: Callable[[], None]


def plan_removal(name: str, folders: Sequence[str], cache_dir: str | None) -> Removal:
    """Finds the files of a model. ValueError or OSError says why there are none that may be removed."""
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf" and (path.is_absolute() or path.exists() or path.is_symlink()):
        return _from_folder(path, folders)
    repositories, _ = scan_cache(cache_dir)
    query = parse_query(name)
    repository = next((each for each in repositories if each.repo_id == query.repository), None)
    if repository is None:
        known = [each.name for each in cached_models(repositories)]
        raise FileNotFoundError(
            f"{unknown_name_error('model', name, known)}; `quintet list` shows the models on this machine"
        )
    files, root = files_of(repository), cache_root(cache_dir)
    if query.quantization is None and query.file is None:
        return _whole_repository(repository, cache_dir)
    wanted = set(_files_of_model(files, query))
    kept = [each for each in files if each not in wanted]
    if not model_heads(kept) and not has_weights(kept):
        return _whole_repository(repository, cache_dir)
    blobs = {entry.blob_path: entry.size_on_disk for each in wanted for entry in files[each]}
    shared = {entry.blob_path for each in kept for entry in files[each]}
    links = [entry.file_path for each in wanted for entry in files[each]]
    free = {blob: size for blob, size in blobs.items() if blob not in shared}
    paths = [*links, *(blob for blob in free if blob not in links)]
    _check_inside(paths, root)
    return Removal(f"{name} ({', '.join(sorted(wanted))})", sum(free.values()), lambda: _delete(paths))


def _files_of_model(files: Collection[str], query: GGUFQuery) -> list[str]:
    """Returns the files of the one GGUF model that a name means; of an interrupted download, the parts that are there.

    Unlike choose(), it guesses nothing: the name is that of the file, or all of its quantization."""
    there = sorted(each for each in files if each.endswith(".gguf") and not BESIDE.search(each.rpartition("/")[2]))
    if query.file is not None:
        return split_parts(query.file, there) if query.file in there else choose(files, query)
    tag = str(query.quantization).lower()
    named = [each for each in there if (quantization_label(each) or "").lower() == tag]
    models = {tuple(split_parts(each, there)) for each in named}
    if len(models) == 1:
        return list(*models)
    if models:
        heads = ", ".join(f"{query.repository}/{each[0]}" for each in sorted(models)[:SHOWN])
        raise ValueError(f"{len(models)} models of {query.repository!r} are {query.quantization}: name one ({heads})")
    labels = list(dict.fromkeys(quantization_label(each) or each for each in there))[:SHOWN]
    held = ", ".join(labels) or "no GGUF files"
    raise FileNotFoundError(f"{query.repository!r} has no GGUF model of {query.quantization!r}; it holds {held}")


def _whole_repository(repository: Any, cache_dir: str | None) -> Removal:
    from huggingface_hub import scan_cache_dir

    root = cache_root(cache_dir)
    strategy = scan_cache_dir(root).delete_revisions(*(each.commit_hash for each in repository.revisions))
    paths = [*strategy.repos, *strategy.snapshots, *strategy.refs, *strategy.blobs]
    _check_inside(paths, root)
    if linked := next((each for each in strategy.repos if each.is_symlink()), None):
        raise ValueError(f"{linked} is a link to {linked.resolve()}; remove the link and what it leads to by hand")
    size = strategy.expected_freed_size
    return Removal(f"{repository.repo_id} ({repository.repo_path})", size, lambda: _delete(paths))


def _from_folder(path: Path, folders: Sequence[str]) -> Removal:
    roots = [Path(os.path.expanduser(each)) for each in folders]
    place = path.parent.resolve()
    if not any(place.is_relative_to(root.resolve()) for root in roots if root.is_dir()):
        where = ", ".join(map(str, folders)) or "none is given"
        raise ValueError(
            f"{str(path)!r} is not in a folder of models ({where}); give --folder, or delete the file yourself"
        )
    if not path.is_file() and not path.is_symlink():
        raise FileNotFoundError(f"no file {str(path)!r} here; `quintet list` shows the models on this machine")
    paths = [path.parent / each for each in split_parts(path.name, [each.name for each in path.parent.iterdir()])]
    size = sum(each.stat().st_size for each in paths if not each.is_symlink())  # a link alone is removed
    return Removal(", ".join(map(str, paths)), size, lambda: _delete(paths))


def _check_inside(paths: Iterable[Path], root: Path) -> None:
    """Raises ValueError if the folder of a path is outside the root, also by a link."""
    inside = root.resolve()
    for each in paths:
        if not each.parent.resolve().is_relative_to(inside):
            raise ValueError(f"{each} is outside the hub's cache {root}, so nothing is removed; delete it yourself")


def _delete(paths: Sequence[Path]) -> None:
    """Deletes files, links and folders, and packed copies of them. OSError names the first that cannot be deleted."""
    originals = [each.resolve() for each in paths if not each.is_symlink()]
    for each in paths:
        try:
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink(missing_ok=True)
        except OSError as error:
            where, why = error.filename or each, error.strerror or error
            raise OSError(f"{where} cannot be deleted ({why}); change its permissions") from error
    if any(cache_folder("weights").glob("*")):  # else the import is not worth its time
        from quintet.model_loader.weights_cache import remove_copies

        remove_copies(originals)

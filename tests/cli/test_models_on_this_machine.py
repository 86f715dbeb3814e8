"""`quintet pull`, `list`, `show` and `rm`: their models, and that nothing outside the cache or a folder is removed."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from quintet.cli import main as cli
from quintet.cli.tables import age, byte_size
from quintet.hub.local_models import local_models
from quintet.hub.model_removal import plan_removal

GGUF = {"m-Q4_K_M.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF88888", "mmproj-F16.gguf": b"GGUF", "README.md": b"x"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def revision(cache: Path, name: str, files: Mapping[str, bytes], commit: str = "a" * 40) -> Path:
    """Writes files as the hub's library does: a blob for each content, and links to blobs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ("main" if commit[0] == "a" else commit[:4])).write_text(commit)
    for file, data in files.items():
        blob = repository / "blobs" / hashlib.sha1(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(os.path.relpath(blob, (snapshot / file).parent))
    return snapshot


def names(cache: Path, *folders: Path) -> dict[str, tuple[int, str]]:
    found, _ = local_models([str(each) for each in folders], str(cache))
    return {each.name: (each.size, each.quantization) for each in found}


def remove(name: str, cache: Path, *folders: Path) -> int:
    removal = plan_removal(name, [str(each) for each in folders], str(cache))
    removal.run()
    return removal.size


def test_list_has_each_quantization_and_each_checkpoint(cache: Path, tmp_path: Path) -> None:
    revision(cache, "a/b", GGUF)
    config = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    revision(cache, "c/d", {"config.json": json.dumps(config).encode(), "model.safetensors": b"12345"})
    revision(cache, "e/f", {"config.json": b'{"dtype": "bfloat16"}', "model.safetensors": b"1"})
    revision(cache, "g/tokenizer", {"tokenizer.json": b"{}"})
    folder = tmp_path / "models"
    (folder / "deep").mkdir(parents=True)
    for number in (1, 2):
        (folder / "deep" / f"big-Q5_K_S-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    assert names(cache, folder) == {
        "a/b:Q4_K_M": (5, "Q4_K_M"),
        "a/b:Q8_0": (9, "Q8_0"),
        "c/d": (5 + len(json.dumps(config)), "awq 4 bits"),
        "e/f": (22, "bfloat16"),
        "g/tokenizer": (2, "no weights"),
        f"{folder}/deep/big-Q5_K_S-00001-of-00002.gguf": (8, "Q5_K_S"),
    }
    assert names(tmp_path / "none") == {}


def test_the_list_command_prints_a_table_or_json(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x-Q8_0.gguf").write_bytes(b"GGUF")
    assert cli.main(["ls", "--download-dir", str(cache)]) == 0
    assert "`quintet pull OWNER/NAME:Q4_K_M` downloads one" in capsys.readouterr().err
    monkeypatch.setenv("QUINTET_MODEL_FOLDERS", str(tmp_path))
    assert cli.main(["list", "--download-dir", str(cache), "--folder", str(tmp_path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "size", "quantization", "used"]
    assert line.split() == [f"{tmp_path}/x-Q8_0.gguf", "4", "B", "Q8_0", "just", "now"]
    assert cli.main(["list", "--download-dir", str(cache), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["name"] == f"{tmp_path}/x-Q8_0.gguf" and entry["size"] == 4
    assert cli.main(["list", "--folder", str(tmp_path / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_rm_frees_a_quantization_and_keeps_the_others(cache: Path) -> None:
    snapshot = revision(cache, "a/b", GGUF)
    assert remove("a/b:q8_0", cache) == 9
    assert names(cache) == {"a/b:Q4_K_M": (5, "Q4_K_M")}
    assert (snapshot / "README.md").read_bytes() == b"x"
    remove("a/b:Q4_K_M", cache)  # the last model of the repository
    assert names(cache) == {} and not snapshot.exists()


def test_rm_keeps_a_blob_that_another_file_has_too(cache: Path) -> None:
    revision(cache, "a/b", {"m-Q4_K_M.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8", "copy-Q6_K.gguf": b"GGUF8"})
    second = revision(cache, "a/b", {"m-Q8_0.gguf": b"GGUF8"}, "b" * 40)
    assert remove("a/b:Q8_0", cache) == 0  # the blob stays, for Q6_K
    assert names(cache) == {"a/b:Q4_K_M": (5, "Q4_K_M"), "a/b:Q6_K": (5, "Q6_K")}
    assert not (second / "m-Q8_0.gguf").exists()
    assert remove("a/b", cache) > 0
    assert names(cache) == {}


def test_rm_removes_nothing_outside_the_cache(cache: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious-Q8_0.gguf"
    precious.write_bytes(b"GGUF")
    snapshot = revision(cache, "a/b", GGUF)
    (snapshot / "evil-Q2_K.gguf").symlink_to(precious)
    with pytest.raises(ValueError, match="outside the hub's cache .*nothing is removed"):
        remove("a/b:Q2_K", cache)
    assert (snapshot / "evil-Q2_K.gguf").exists()
    remove("a/b", cache)  # the repository with its links
    assert precious.read_bytes() == b"GGUF"

    other = revision(tmp_path / "other", "c/d", GGUF)
    (cache / "models--c--d").symlink_to(other.parents[1])
    with pytest.raises(ValueError, match=r"is a link to .*; remove the link"):
        remove("c/d", cache)
    with pytest.raises(ValueError, match="outside the hub's cache"):
        remove("c/d:Q8_0", cache)
    assert (other / "m-Q8_0.gguf").read_bytes() == b"GGUF88888"


def test_rm_removes_files_of_a_folder_alone(tmp_path: Path, cache: Path) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    parts = [folder / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for file in (*parts, outside / "x.gguf"):
        file.write_bytes(b"GGUF")
    (folder / "linked").symlink_to(outside)
    (folder / "link.gguf").symlink_to(outside / "x.gguf")
    for name in (outside / "x.gguf", folder / "linked" / "x.gguf", folder / ".." / "outside" / "x.gguf"):
        with pytest.raises(ValueError, match="is not in a folder of models"):
            remove(str(name), cache, folder)
    assert remove(str(folder / "link.gguf"), cache, folder) == 0  # the link, not the file
    assert remove(str(parts[0]), cache, folder) == 8
    assert [each.name for each in folder.iterdir()] == ["linked"]
    assert (outside / "x.gguf").read_bytes() == b"GGUF"


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_rm_asks(
    answer: str, code: int, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    revision(cache, "a/b", GGUF)
    words = ["rm", "a/b:Q8_0", "--download-dir", str(cache)]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    assert cli.main(words) == 1
    assert "--yes removes without a question" in capsys.readouterr().err
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    assert cli.main(words) == code
    assert asked == ["remove a/b:Q8_0 (m-Q8_0.gguf), 9 B? [y/N] "]
    assert ("a/b:Q8_0" in names(cache)) == bool(code)


def test_rm_names_the_nearest_model(cache: Path) -> None:
    revision(cache, "owner/model", GGUF)
    with pytest.raises(FileNotFoundError, match="did you mean 'owner/model:Q"):
        plan_removal("owner/modle:Q8_0", [], str(cache))
    with pytest.raises(FileNotFoundError, match="has no GGUF model of 'Q2_K'; it holds Q4_K_M, Q8_0"):
        plan_removal("owner/model:Q2_K", [], str(cache))


def test_show_has_the_facts_and_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "bundled", "--device", "null"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["family"] == "llama" and lines["context"] == "1,024 tokens" and lines["quantization"] == "bfloat16"
    assert lines["parameters"] == "4.7 M"
    assert lines["memory"].startswith("fits: weights 0.01 GiB + workspace ")
    assert " + KV cache of 1,024 tokens " in lines["memory"]
    assert cli.main(["show", "bundled", "--device", "null", "--gpu-memory-utilization", "1e-9"]) == 1
    assert "does not fit: weights" in capsys.readouterr().out


def test_show_downloads_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "a/b:Q8_0", "--download-dir", str(cache)]) == 1
    assert "`quintet pull a/b:Q8_0` downloads it" in capsys.readouterr().err


def test_pull_downloads_what_the_name_means(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [SimpleNamespace(rfilename=each) for each in GGUF]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        return str(revision(cache, name, GGUF))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert cli.main(["pull", "a/b:Q8_0"]) == 0
    assert asked == [["m-Q8_0.gguf", "mmproj-F16.gguf"]]
    assert capsys.readouterr().out.startswith("a/b:Q8_0: 9 B in ")
    assert cli.main(["pull", "bundled"]) == 0
    assert "bundled is on this machine" in capsys.readouterr().out


def test_sizes_and_ages_are_read_at_a_glance() -> None:
    assert [byte_size(each) for each in (9, 2_000, 241 * 2**20, 5 * 2**30)] == ["9 B", "2 KiB", "241 MiB", "5.0 GiB"]
    assert [age(each) for each in (5, 61, 7200, 90_000)] == ["just now", "1 minute ago", "2 hours ago", "1 day ago"]


def test_the_home_of_an_unknown_user_is_absent(cache: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder '~no-such-user'"):
        local_models(["~no-such-user"], str(cache))
    with pytest.raises(FileNotFoundError, match="'~no-such-user/x'"):
        plan_removal("~no-such-user/x", ["~no-such-user"], str(cache))


@pytest.mark.parametrize("name", ["a/b", "a/b:Q8_0"])
def test_rm_fails_where_a_file_cannot_be_deleted(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    revision(cache, "a/b", GGUF)

    def refuse(path: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.chdir(cache.parents[1])
    for directory in (str(cache), f"{cache.parent.name}/{cache.name}"):
        assert cli.main(["rm", "-y", name, "--download-dir", directory]) == 1
        captured = capsys.readouterr()
        assert "removed" not in captured.out and "Traceback" not in captured.err
        assert captured.err.startswith(f"quintet rm: error: {cache}/models--a--b")
        assert "cannot be deleted (Permission denied)" in captured.err


def test_rm_takes_a_quantization_by_its_whole_name(cache: Path) -> None:
    files = {"m-UD-Q4_K_M.gguf": b"1", "m-Q8_0.gguf": b"22", "n-Q8_0.gguf": b"333", "m-Q6_K-v2.gguf": b"4444"}
    revision(cache, "a/b", files)
    for tag in ("Q4_K_M", "Q6_K"):
        with pytest.raises(FileNotFoundError, match=f"has no GGUF model of '{tag}'; it holds "):
            plan_removal(f"a/b:{tag}", [], str(cache))
    with pytest.raises(ValueError, match=r"2 models of 'a/b' are Q8_0: name one \(a/b/m-Q8_0.gguf, a/b/n-Q8_0.gguf\)"):
        plan_removal("a/b:Q8_0", [], str(cache))
    assert remove("a/b/n-Q8_0.gguf", cache) == 3
    assert remove("a/b:ud-q4_k_m", cache) == 1
    assert names(cache) == {"a/b:Q8_0": (2, "Q8_0"), "a/b/m-Q6_K-v2.gguf": (4, "GGUF")}


@pytest.mark.parametrize("name", ["a/b:Q8_0", "a/b/m-Q8_0-00001-of-00003.gguf"])
def test_rm_removes_an_interrupted_download(name: str, cache: Path) -> None:
    parts = {f"m-Q8_0-0000{number}-of-00003.gguf": b"1" * number for number in (1, 2)}
    revision(cache, "a/b", {"m-Q4_K_M.gguf": b"4", **parts})
    assert remove(name, cache) == 3
    assert names(cache) == {"a/b:Q4_K_M": (1, "Q4_K_M")}

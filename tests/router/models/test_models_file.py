"""`--models`: YAML files and folders, and how their mistakes are refused."""

from pathlib import Path

import pytest

from quintet.router.models.config import NEVER, ModelsConfig
from quintet.router.models.models_file import read_models


def written(folder: Path, text: str) -> str:
    file = folder / "models.yaml"
    file.write_text(text)
    return str(file)


def test_a_mapping_has_models_with_any_flags(tmp_path: Path) -> None:
    path = written(tmp_path, """
chat:
  model: bundled
  aliases: [gpt-4o, "claude-*"]
  pinned: true
  max-model-len: 512
  tool_call_parser: hermes
small: bundled-embed
other:
  model: bundled
  keep_alive: -1
  memory: 2G
""")  # fmt: skip
    chat, small, other = read_models(path, {"max_model_len": 64}, {})
    assert (chat.name, chat.engine.model, chat.aliases, chat.pinned) == (
        "chat",
        "bundled",
        ("gpt-4o", "claude-*"),
        True,
    )
    assert (chat.engine.max_model_len, chat.server.tool_call_parser) == (512, "hermes"), "an entry comes before flags"
    assert (small.name, small.engine.model, small.engine.max_model_len) == ("small", "bundled-embed", 64)
    assert (other.keep_alive, other.memory, other.pinned) == (NEVER, 2 * 2**30, False)
    assert chat.server.served_model_name == ("chat",)


def test_an_entry_takes_over_another_ones_settings(tmp_path: Path) -> None:
    text = "a: &a {model: bundled, max_model_len: 64}\nb: {<<: *a, max_model_len: 32}\n"
    one, two = read_models(written(tmp_path, text), {}, {})
    assert [(each.engine.model, each.engine.max_model_len) for each in (one, two)] == [("bundled", 64), ("bundled", 32)]


def test_adapters_of_a_model_are_names_of_their_own(tmp_path: Path) -> None:
    text = "a: {model: bundled, enable_lora: true, lora_modules: [{name: sql, path: x}, law=y]}\n"
    (found,) = read_models(written(tmp_path, text), {}, {})
    assert [(each.name, each.path) for each in found.server.lora_modules] == [("sql", "x"), ("law", "y")]
    with pytest.raises(ValueError, match="'sql' names both 'a' and 'sql'"):
        read_models(written(tmp_path, text + "sql: bundled\n"), {}, {})


@pytest.mark.parametrize(
    ("entry", "refusal"),
    [
        ("lora_modules: [sql=x]", "lora_modules needs enable_lora"),
        ("enable_lora: true, allow_runtime_lora: true", "allow_runtime_lora: adapters of --models are those of"),
        ("enable_lora: true, lora_modules: [a=x]", "'a', which is the model's own name"),
        ("enable_lora: true, lora_modules: [x]", "must be NAME=FOLDER"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(entry: str, refusal: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=refusal):
        read_models(written(tmp_path, f"a: {{model: bundled, {entry}}}\n"), {}, {})


def test_a_model_in_the_place_of_the_list_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="is one model; give it as MODEL"):
        read_models(str(tmp_path / "a.gguf"), {}, {})


@pytest.mark.parametrize(
    "text",
    [
        "- bundled\n- {name: two, model: bundled-embed}",
        "models:\n  - model: bundled\n  - {name: two, model: bundled-embed}",
    ],
)
def test_a_list_takes_names_from_its_entries(tmp_path: Path, text: str) -> None:
    assert [each.name for each in read_models(written(tmp_path, text), {}, {})] == ["bundled", "two"]


def test_a_folder_has_a_model_for_each_file_and_model_folder(tmp_path: Path) -> None:
    for name in ("b.Q4_K_M.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-b.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    found = read_models(str(tmp_path), {}, {})
    assert [each.name for each in found] == ["b.Q4_K_M", "big", "checkpoint"]
    assert found[1].engine.model == str(tmp_path / "big-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("chat:\n  model: bundled\n  max_modl_len: 4\n", r"line 3, .* 'max_modl_len'; did you mean 'max_model_len'"),
        ("chat:\n  model: bundled\n  max_model_len: many\n", r"line 3, model 'chat': max_model_len must be"),
        ("chat:\n  model: bundled\n  keep_alive: soon\n", r"line 3, .*: keep_alive must be seconds.* or -1 for"),
        ("chat:\n  model: bundled\n  memory: much\n", r"line 3, model 'chat': memory must be bytes such as 8G"),
        ("chat:\n  model: bundled\n  pined: true\n", r"'pined'; did you mean 'pinned'"),
        ("chat:\n  model: bundled\n  port: 80\n", r"line 3, model 'chat': port is of the server that all models share"),
        ("chat:\n  max_model_len: 4\n", r"line 1: the model chat has no `model:`"),
        ("chat:\n  model: bundled\n  swap_space: 4\n", r"line 3.*swap_space"),
        ("a: bundled\nb: {model: bundled, aliases: [a]}\n", r"'a' names both 'a' and 'b'; rename one"),
        ("a b: bundled\n", r"the name 'a b' must be"),
        ("just text", r"must be a mapping"),
        ("a: [1]\n", r"line 1: must be a model or a mapping"),
        ("a: {model: bundled\n", r"cannot be read: .*line 2"),
        ("a: {model: bundled, model: other}\n", r"line 1: model is given twice; keep one"),
        ("[]", r"0 models, and 1 to 256"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_line_key_and_remedy(tmp_path: Path, text: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal) as error:
        read_models(written(tmp_path, text), {}, {})
    assert "models.yaml" in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--models .*none.yaml: the file cannot be read: .*No such file"):
        read_models(str(tmp_path / "none.yaml"), {}, {})


@pytest.mark.parametrize(("given", "bytes_or_share"), [("8G", 8 * 2**30), ("0.5", 0.5), (1 << 30, 1 << 30)])
def test_a_budget_is_bytes_or_a_share(given: object, bytes_or_share: object) -> None:
    assert ModelsConfig(memory_budget=given).memory_budget == bytes_or_share  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_budget must be bytes such as 8G, or a share"):
        ModelsConfig(memory_budget="-1")

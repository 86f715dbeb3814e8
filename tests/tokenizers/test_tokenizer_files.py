"""A tokenizer kept from one start to the next is the one that transformers makes of its files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, Qwen2Tokenizer

import quintet
from quintet.config.cache_dir import cache_folder
from quintet.hub import transformers_cache as readings
from quintet.tokenizers.tokenizer import contents, freeze, load_tokenizer
from tests.helpers.checkpoints import tokenizers as builders
from tests.tokenizers.test_detokenizer import HOSTILE

TEXTS = [*HOSTILE, "I'LL pay 1234 €\r\n\n  for\tit", "<|im_start|>user\nHi<|im_end|>", "e\u0301"]


def qwen(folder: Path) -> None:
    """As Qwen 2 and 3: no BOS, the named tokens special, others not."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        builders.CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    state = json.loads(trained.to_str())["model"]
    hf = Qwen2Tokenizer(
        vocab=state["vocab"], merges=[tuple(merge) for merge in state["merges"]], eos_token="<|im_end|>", unk_token=None
    )
    hf.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    hf.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    hf.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # as in the files on the hub
    hf.chat_template = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    hf.save_pretrained(folder)
    _edit(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    _write(folder / "config.json", {"model_type": "qwen3"})


def bundled(folder: Path) -> None:
    shutil.copytree(Path(quintet.__file__).parent / "bundled", folder, dirs_exist_ok=True)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "byte_level": builders.byte_level,
    "byte_fallback": builders.byte_fallback,
    "metaspace": builders.metaspace,
    "word_piece": builders.word_piece,
    "bundled": bundled,
    "qwen": qwen,
}


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def _edit(file: Path, **entries: Any) -> None:
    _write(file, {**json.loads(file.read_text(encoding="utf-8")), **entries})


def _lists_added_tokens(folder: Path) -> None:
    """As most models on the hub."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    listed = {str(token.pop("id")): token for token in described["added_tokens"]}
    _edit(folder / "tokenizer_config.json", added_tokens_decoder=listed)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def _kept() -> list[dict[str, Any]]:
    return [json.loads(file.read_bytes()) for file in cache_folder("readings").glob("*.reading")]


def assert_same(folder: Path) -> None:
    """The first start makes it, the second has it kept."""
    hf, first, kept = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder), load_tokenizer(folder)
    assert kept.backend.to_str() == first.backend.to_str() == hf.backend_tokenizer.to_str()
    for ours in (first, kept):
        assert list(ours.special_tokens.items()) == list(hf.special_tokens_map.items())
        assert (ours.bos_token, ours.bos_id) == (hf.bos_token, hf.bos_token_id)
        assert ours.eos_ids == (() if hf.eos_token_id is None else (hf.eos_token_id,))
        assert ours.chat_template == hf.chat_template
        assert (len(ours), ours.special_ids >= {*hf.all_special_ids}) == (len(hf), True)
        for text in TEXTS:
            for special in (True, False):
                ids = ours.backend.encode(text, add_special_tokens=special).ids
                assert ids == hf.encode(text, add_special_tokens=special)
                assert ours.decode(ids, special) == hf.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_folder_makes_transformers_tokenizer(kind: str, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path)
    assert_same(tmp_path)
    _lists_added_tokens(tmp_path)
    assert_same(tmp_path)
    assert len(_kept()) == 2 - (kind == "bundled")  # whose own comes with the package


def test_a_template_in_the_configuration_is_found(tmp_path: Path) -> None:
    builders.byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    _edit(tmp_path / "tokenizer_config.json", chat_template="{{ bos_token }}")
    assert_same(tmp_path)


def test_the_older_map_of_special_tokens_counts(tmp_path: Path) -> None:
    builders.byte_level(tmp_path)
    _write(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "<|end|>", "lstrip": False}})
    assert_same(tmp_path)
    assert load_tokenizer(tmp_path).special_tokens["eos_token"] == "<|end|>"


CONFIG = "tokenizer_config.json"
# kind, file, entries that make the tokenizer another than its tokenizer.json
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("byte_level", CONFIG, {"tokenizer_class": "LlamaTokenizer"}),
    ("byte_level", CONFIG, {"tokenizer_class": None}),
    ("byte_level", CONFIG, {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
    ("byte_level", CONFIG, {"bos_token": "<new>"}),
    ("byte_level", CONFIG, {"eos_token": "<tool>"}),
    ("byte_level", CONFIG, {"image_token": "<tool>"}),
    ("byte_level", CONFIG, {"additional_special_tokens": ["<new>"]}),
    ("byte_level", CONFIG, {"extra_special_tokens": {"image_token": "<|user|>"}}),
    ("byte_level", CONFIG, {"split_special_tokens": True}),
    ("byte_level", CONFIG, {"chat_template": [{"name": "default", "template": "a"}]}),
    ("byte_level", CONFIG, {"added_tokens_decoder": {"0": {"content": "<s>", "lstrip": True, "special": True}}}),
    ("byte_level", "added_tokens.json", {"<new>": 500}),
    ("byte_level", "config.json", {"model_type": "mistral"}),
    ("byte_level", "config.json", {"model_type": "qwen2"}),
    ("qwen", "config.json", {"model_type": "llama"}),
    ("qwen", "tokenizer.json", {"normalizer": None}),
    ("qwen", "tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}),
    ("qwen", CONFIG, {"add_prefix_space": True}),
]


@pytest.mark.parametrize(("kind", "name", "entries"), OTHERS, ids=lambda value: str(value)[:40])
def test_what_the_class_makes_of_the_file_is_kept(
    kind: str, name: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    MAKERS[kind](tmp_path)
    before = load_tokenizer(tmp_path)
    if kind == "byte_level" and "chat_template" in entries:
        (tmp_path / "chat_template.jinja").unlink()
    if not (tmp_path / name).exists():
        _write(tmp_path / name, {})
    _edit(tmp_path / name, **entries)
    assert load_tokenizer(tmp_path) is not before
    assert_same(tmp_path)


def test_a_file_that_says_it_all_is_not_kept_twice(tmp_path: Path) -> None:
    builders.byte_level(tmp_path)
    load_tokenizer(tmp_path)
    (kept,) = _kept()
    assert [reading["backend"] for reading in kept.values()] == [None]


def test_weights_are_not_read_and_what_is_beside_them_is(tmp_path: Path) -> None:
    builders.byte_level(tmp_path)
    names = [readings.digest("tokenizer", contents(tmp_path))]
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    names.append(readings.digest("tokenizer", contents(tmp_path)))
    (tmp_path / "bpe.codes").write_bytes(b"a b")
    names.append(readings.digest("tokenizer", contents(tmp_path)))
    assert names[0] == names[1] != names[2]


def test_a_tokenizer_of_python_code_is_made_each_time(tmp_path: Path) -> None:
    builders.byte_level(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(object())
    assert freeze(tokenizer, tmp_path) is None


@pytest.mark.slow
def test_transformers_is_imported_when_its_object_is_asked_for() -> None:
    folder = Path(quintet.__file__).parent / "bundled"
    code = (
        "import sys; from quintet.tokenizers.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(folder)!r})\n"
        "assert tokenizer.decode(tokenizer.encode('Once upon'))\n"
        "assert 'transformers' not in sys.modules\n"
        "assert tokenizer.hf.decode(tokenizer.hf.encode('Once upon', add_special_tokens=False)) == 'Once upon'\n"
        "assert tokenizer.hf is tokenizer.hf and tokenizer.hf.backend_tokenizer.truncation is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------------ absurd files


def test_a_panic_of_the_backend_is_the_callers_own(tmp_path: Path) -> None:
    """It is no Exception of Python's."""
    tokenizer = builders.giving_up(tmp_path)
    with pytest.raises(
        ValueError, match=r"^the tokenizer cannot encode this text \(.*\); give another, or mend [^\n]*$"
    ):
        tokenizer.encode(builders.GIVES_UP)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def assert_one_line_error(folder: Path, *words: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        load_tokenizer(folder)
    said = str(error.value)
    assert len(said.splitlines()) == 1 and len(said) < 1000, said
    assert all(word in said for word in words), said


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 200_000 + "]" * 200_000, "nests lists or objects more than 64 deep"),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", "nests lists or objects more than 64 deep"),
        ("7", "must hold a JSON object"),
        ("{", "is not JSON"),
    ],
    ids=["deep", "less deep", "a number", "cut"],
)
def test_what_is_no_tokenizers_file(name: str, text: str, says: str, tmp_path: Path) -> None:
    builders.byte_level(tmp_path)
    (tmp_path / name).write_text(text)
    assert_one_line_error(tmp_path, str(tmp_path / name), says)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 2**70}, "merges": []}}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}),
        ("tokenizer.json", {"model": 5}),
        ("tokenizer.json", {"added_tokens": [{"id": "x", "content": 5}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "y"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}),
        ("tokenizer_config.json", {"bos_token": 5}),
        ("tokenizer_config.json", {"eos_token": ["</s>"]}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_entries_that_no_tokenizer_has(name: str, entries: dict[str, Any], tmp_path: Path) -> None:
    builders.byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    _edit(tmp_path / name, **entries)
    assert_one_line_error(tmp_path, "tokenizer")


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "tokenizer_config.json"])
def test_a_folder_without_a_tokenizer_json(name: str, tmp_path: Path) -> None:
    """It is converted where that is possible, and said with the remedy where it is not."""
    (tmp_path / name).write_text("{}")
    _write(tmp_path / "config.json", {"model_type": "llama"})
    assert_one_line_error(tmp_path, "no tokenizer.json", "copy the file from the model's source", "save_pretrained(")

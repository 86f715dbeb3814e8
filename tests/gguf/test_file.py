"""GGUF headers: what one says, and what of a damaged or hostile one is an error of one line."""

import struct
from pathlib import Path

import pytest

from quintet.gguf.cursor import Array, Cursor
from quintet.gguf.file import files, is_gguf, read, read_metadata
from tests.helpers.checkpoints.gguf import ARRAY, STRING, Row, header, text

ARCHITECTURE = {"general.architecture": "llama"}
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8


def written(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def refused(folder: Path, content: bytes) -> str:
    path = written(folder, content)
    with pytest.raises(ValueError, match=str(path)) as error:
        read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    numbers = {f"n{kind}": struct.pack(f"<I{code}", kind, 3) for kind, code in _NUMBERS.items()}
    said = {"text": "café", "yes": True, "no": False, "words": ["a", "", "ü"], "weights": [0.5, 2.0], **numbers}
    found = read_metadata(written(tmp_path, header(said)))
    assert found["text"] == "café" and found["yes"] is True and found["no"] is False
    assert list(found["words"]) == ["a", "", "ü"] and found["words"][2] == "ü" and len(found["words"]) == 3
    assert found["weights"][:] == [0.5, 2.0] and found["weights"][-1] == 2.0
    assert all(found[f"n{kind}"] == 3 for kind in _NUMBERS)


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}


def test_both_versions_are_read(tmp_path: Path) -> None:
    for version in (2, 3):
        assert read(written(tmp_path, header(ARCHITECTURE, version=version))).metadata == ARCHITECTURE


def test_tokens_that_are_no_text_are_told_apart(tmp_path: Path) -> None:
    tokens = read_metadata(written(tmp_path, header({"tokens": ["\udcff", "\udcfe"]})))["tokens"]
    assert [each.encode(errors="surrogateescape") for each in tokens] == [b"\xff", b"\xfe"]


def test_strings_are_found_by_their_bytes_in_every_place(tmp_path: Path) -> None:
    """Also behind each other, and not within another string that holds the same bytes with the same length before."""
    within = text("end").decode()
    words = ["end", "", "ends", "end", within, "café", "\udcff", "caf", "end"]
    found = read_metadata(written(tmp_path, header({"words": words})))["words"]
    assert isinstance(found, Array)
    assert sorted(found.positions({"end", "café", "missing"})) == [0, 3, 5, 8]
    assert list(found.positions({""})) == [1]
    assert [found[index] for index in range(-1, 8)] == [words[-1], *words[:-1]]


def test_a_list_is_walked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, walks = written(tmp_path, header({"words": ["a", "b"]})), []
    walk = Cursor._skip_texts
    monkeypatch.setattr(Cursor, "_skip_texts", lambda self, *rest: walks.append(rest) or walk(self, *rest))
    assert read_metadata(path) is read_metadata(path) and len(walks) == 1
    written(tmp_path, header({"words": ["a", "b", "c"]}))
    assert len(read_metadata(path)["words"]) == 3 and len(walks) == 2


def test_tensors_lie_where_the_table_says(tmp_path: Path) -> None:
    start = header(ARCHITECTURE, [Row("a", (64, 2), Q4_0, 0), Row("b", (3,), F32, 96)])
    found = read(written(tmp_path, start + bytes(96 + 12))).tensors
    assert found["a"].kind.name == "Q4_0" and found["a"].shape == (2, 64) and found["a"].start == len(start)
    assert found["a"].size == 72 and found["b"].start == len(start) + 96 and found["b"].size == 12


def test_the_alignment_is_the_files_own(tmp_path: Path) -> None:
    start = header({"general.alignment": 64}, [Row("a", (4,), F32, 64)])
    start += bytes(-len(start) % 64)
    assert read(written(tmp_path, start + bytes(80))).tensors["a"].start == len(start) + 64


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    assert "no GGUF file" in refused(tmp_path, b"PK\3\4" + bytes(60))
    assert "0 bytes" in refused(tmp_path, b"")
    assert not is_gguf(tmp_path) and not is_gguf(tmp_path / "model.gguf")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.gguf")


def test_other_versions_and_byte_orders_are_refused(tmp_path: Path) -> None:
    assert "version 1" in refused(tmp_path, header(ARCHITECTURE, version=1))
    assert "big-endian" in refused(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32))


@pytest.mark.parametrize("counts", [(2**63, 0), (0, 2**63), (2**64 - 1, 2**64 - 1), (1000, 0), (0, 1000)])
def test_counts_beyond_the_file_are_refused(tmp_path: Path, counts: tuple[int, int]) -> None:
    assert f"{max(counts)}" in refused(tmp_path, header(ARCHITECTURE, counts=counts))


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IQ", STRING, 2**63) + b"text",  # a length
        struct.pack("<IIQ", ARRAY, STRING, 2**63),  # strings
        struct.pack("<IIQQ", ARRAY, STRING, 1, 2**62),  # the last string's length
        struct.pack("<IIQ", ARRAY, 10, 2**61),  # numbers whose bytes would be 2^64
        struct.pack("<IIQ", ARRAY, ARRAY, 1),
        struct.pack("<IIQ", ARRAY, 99, 1),
        struct.pack("<I", 99),
        struct.pack("<IB", 7, 2),  # neither true nor false
        struct.pack("<IQ", STRING, 1) + b"\xff",
    ],
)
def test_values_that_cannot_be_are_refused_by_name(tmp_path: Path, value: bytes) -> None:
    assert "'some.key'" in refused(tmp_path, header({"some.key": value}))


def test_entries_and_tensors_stand_there_once(tmp_path: Path) -> None:
    entry = text("key") + struct.pack("<II", 4, 7)
    twice = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry
    assert "'key' stands there twice" in refused(tmp_path, twice)
    rows = [Row("a", (4,), F32, 0), Row("a", (4,), F32, 32)]
    assert "'a' stands there twice" in refused(tmp_path, header(ARCHITECTURE, rows) + bytes(64))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row("blk", (4,), 77, 0), "type 77"),
        (Row("blk", (4,), 4, 0), "type 4"),  # was taken back
        (Row("blk", (33,), Q8_0, 0), "multiple of 32"),
        (Row("blk", (0,), F32, 0), "[0]"),
        (Row("blk", (4, 0), F32, 0), "[0, 4]"),
        (Row("blk", (4,), F32, 8), "alignment"),
        (Row("blk", (1, 1, 1, 1, 1), F32, 0), "5 axes"),
        (Row("blk", (), F32, 0), "0 axes"),
        (Row("blk", (2**63, 2), F32, 0), "cut short"),
        (Row("blk", (2**32, 2**32), F32, 0), "cut short"),  # 2^64 numbers, 0 in 64 bits
        (Row("blk", (4,), F32, 2**63), "cut short"),
        (Row("blk", (64,), F32, 0), "cut short"),
    ],
)
def test_tensors_that_cannot_be_are_refused_by_name(tmp_path: Path, row: Row, why: str) -> None:
    message = refused(tmp_path, header(ARCHITECTURE, [row]) + bytes(64))
    assert "'blk'" in message and why in message


@pytest.mark.parametrize("name", ["\n", "a\x1b[2J", "b\u2028"], ids=ascii)
def test_names_that_cannot_be_printed_are_refused(name: str, tmp_path: Path) -> None:
    """They would stand in errors and logs."""
    said = refused(tmp_path, header(ARCHITECTURE, [Row(name, (4,), F32, 0)]) + bytes(64))
    assert f"tensor {name!r} has a name that cannot be printed" in said


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    rows = [Row("b", (4,), F32, 32), Row("a", (16,), F32, 0)]
    assert "'b' begins within 'a'" in refused(tmp_path, header(ARCHITECTURE, rows) + bytes(64))


@pytest.mark.parametrize("alignment", [0, 24, 2**31, "32", True])
def test_alignments_that_cannot_be_are_refused(tmp_path: Path, alignment: object) -> None:
    assert "general.alignment" in refused(tmp_path, header({"general.alignment": alignment}))


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = header({"words": ["a", "b"], "n": 3}, [Row("a", (4,), F32, 0)]) + bytes(16)
    said = [refused(tmp_path, whole[:size]) for size in range(len(whole))]
    assert len(said) == len(whole) > 100 and all(len(each) > len(str(tmp_path)) + 20 for each in said)


def split(folder: Path, number: int, count: int, names: list[str], **more: int) -> Path:
    said = {"split.no": struct.pack("<IH", 2, number), "split.count": struct.pack("<IH", 2, count)}
    said["split.tensors.count"] = struct.pack("<Ii", 5, more.get("tensors", 2))
    rows = [Row(name, (4,), F32, 32 * index) for index, name in enumerate(names)]
    name = f"m-{more.get('called', number) + 1:05}-of-{count:05}.gguf"
    return written(folder, header(said, rows) + bytes(32 * len(rows)), name)


def test_a_split_model_is_found_from_any_of_its_files(tmp_path: Path) -> None:
    paths = [split(tmp_path, 0, 2, ["a"]), split(tmp_path, 1, 2, ["b"])]
    for path in paths:
        assert [each.path for each in files(path)] == paths


def test_a_split_model_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    first = split(tmp_path, 0, 2, ["a"])
    with pytest.raises(FileNotFoundError, match="m-00002-of-00002"):
        files(first)
    split(tmp_path, 1, 2, ["a"])
    with pytest.raises(ValueError, match="'a' is in another file of the model too"):
        files(first)
    split(tmp_path, 0, 2, ["b"], called=1)
    with pytest.raises(ValueError, match="number 0 of 2"):
        files(first)
    split(tmp_path, 1, 2, ["b", "c"])
    with pytest.raises(ValueError, match="3 tensors, not 2"):
        files(first)
    with pytest.raises(ValueError, match="its name does not say so"):
        files(first.rename(tmp_path / "other.gguf"))

"""Which GGUF file a model's name means."""

import pytest

from quintet.gguf.file_choice import GGUFQuery, choose, parse_query

FILES = [
    "README.md",
    "imatrix_Q4_K_M.gguf",
    "mmproj-model-Q4_K_M.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model-UD-Q4_K_XL.gguf",
    "model-IQ4_NL.gguf",
    "model.q8_0.gguf",
    "BF16/model-BF16-00001-of-00002.gguf",
    "BF16/model-BF16-00002-of-00002.gguf",
]
PARTS = FILES[-2:]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("a/b", GGUFQuery("a/b")),
        ("a/b:Q4_K_M", GGUFQuery("a/b", "Q4_K_M")),
        ("a/b:UD-Q4_K_XL", GGUFQuery("a/b", "UD-Q4_K_XL")),
        ("a/b/c.gguf", GGUFQuery("a/b", file="c.gguf")),
        ("a/b/q4/c-00001-of-00002.gguf", GGUFQuery("a/b", file="q4/c-00001-of-00002.gguf")),
        ("a/b:", GGUFQuery("a/b:")),
        ("a/b:Q4 K", GGUFQuery("a/b:Q4 K")),
    ],
)
def test_names_are_taken_apart(name: str, want: GGUFQuery) -> None:
    assert parse_query(name) == want


@pytest.mark.parametrize(
    ("wanted", "want"),
    [
        (GGUFQuery("a/b"), ["model-Q4_K_M.gguf"]),
        (GGUFQuery("a/b", "q4_k_m"), ["model-Q4_K_M.gguf"]),
        (GGUFQuery("a/b", "Q8_0"), ["model.q8_0.gguf"]),
        (GGUFQuery("a/b", "UD-Q4_K_XL"), ["model-UD-Q4_K_XL.gguf"]),
        (GGUFQuery("a/b", "Q4_K_XL"), ["model-UD-Q4_K_XL.gguf"]),
        (GGUFQuery("a/b", "bf16"), PARTS),
        (GGUFQuery("a/b", file=PARTS[1]), PARTS),
        (GGUFQuery("a/b", file="mmproj-model-Q4_K_M.gguf"), ["mmproj-model-Q4_K_M.gguf"]),
    ],
)
def test_a_quantization_is_found(wanted: GGUFQuery, want: list[str]) -> None:
    assert choose(reversed(FILES), wanted) == want


def test_where_nothing_is_asked_for_the_usual_ones_come_first() -> None:
    assert choose(["x-F16.gguf", "x-Q8_0.gguf"], GGUFQuery("a/b")) == ["x-Q8_0.gguf"]
    assert choose(["x-Q5_0.gguf", "x-F16.gguf"], GGUFQuery("a/b")) == ["x-F16.gguf"]


@pytest.mark.parametrize(
    ("files", "wanted", "says"),
    [
        (["config.json"], GGUFQuery("a/b", "Q4_0"), "'a/b' holds no GGUF files; use its name alone"),
        (
            FILES,
            GGUFQuery("a/b", "Q4_NL"),
            "has no GGUF model of 'Q4_NL'; it holds BF16, IQ4_NL, Q4_K_M, Q4_K_S, UD-Q4_K_XL, q8_0",
        ),
        (FILES, GGUFQuery("a/b", file="x.gguf"), "'a/b' has no file 'x.gguf'; it holds BF16/model"),
        (PARTS[:1], GGUFQuery("a/b"), "'a/b' lacks BF16/model-BF16-00002-of-00002.gguf of the 00002 files"),
        (["mmproj-F16.gguf"], GGUFQuery("a/b"), "'a/b' has no GGUF model; it holds mmproj-F16.gguf"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(files: list[str], wanted: GGUFQuery, says: str) -> None:
    with pytest.raises(FileNotFoundError, match=".") as error:
        choose(files, wanted)
    assert says in str(error.value)

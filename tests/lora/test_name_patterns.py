"""Patterns of module paths: they match what PEFT's `re` matches, and none takes long."""

import random
import re

import pytest

from quintet.lora.name_patterns import MAX_LENGTH, Automaton, ModulePatterns, PatternError

PATHS = [
    "q_proj", "xq_proj", "model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", "layers.1.q_proj",
    "model.layers.1.mlp.down_proj", "transformer.h.0.attn.c_attn", "a", "ab", "aab", "a.b", "a-b", "b.a", "", "model",
    "model.layers.1.mlp.experts.3.w1", "lm_head", "{}", "a{1}", "q]", "é", "a_b",
]  # fmt: skip
PATTERNS = [
    "q_proj",
    "layers.1.q_proj",
    "q.proj",
    "^model",
    "^q_proj",
    "model$",
    ".*",
    ".*q_proj",
    r"layers\.1\..*",
    r"layers\.\d+\..*",
    "(q|v|down)_proj",
    "(?:q|v)_proj|lm_head",
    "(?P<kind>q|k)_proj",
    "[qkv]_proj",
    "[^q]_proj",
    "[a-z]+",
    "a{2}b",
    "a{1,2}b",
    "a{,2}b",
    "a{0}b",
    "(a|aa)+b?",
    "(a*)*b",
    "(a+)+",
    "(a|a)*",
    "a?b??",
    "(|a)b",
    "[]q]+",
    r"\w\W\w",
    r"\D\.\S",
    r"[\w.]+",
    r"[a\-b]+",
    "a{}",
    "{}",
    "x|",
    "()",
    r"(layers\.(0|1)\.)?self_attn\.q_proj",
    "h.0",
    r"model\.(\w+\.)*w1",
    "^a$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_peft_matches(pattern: str) -> None:
    values = ModulePatterns({pattern: True})
    wanted = [path for path in PATHS if re.match(rf"(.*\.)?({pattern})$", path)]
    assert [path for path in PATHS if values.find(path)] == wanted


@pytest.mark.filterwarnings("ignore:Possible (nested|set)")
def test_patterns_of_chance_match_what_re_matches() -> None:
    chance, compared = random.Random(1), 0
    for _ in range(3000):
        pattern = "".join(chance.choices("ab.|()*+?^$[]-", k=chance.randint(1, 7)))
        try:
            automaton, known = Automaton(pattern), re.compile(rf"(.*\.)?({pattern})$")
        except (PatternError, re.error):
            continue
        for _ in range(10):
            path = "".join(chance.choices("ab.-", k=chance.randint(0, 6)))
            assert automaton.matches(path)[0] == bool(known.match(path)), (pattern, path)
        compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    ("entries", "path", "value"),
    [
        ({"q_proj": 1, ".*q_proj": 2}, "a.q_proj", 1),
        ({".*q_proj": 2, "q_proj": 1}, "a.q_proj", 2),
        ({"b.q_proj": 1, "q_proj": 2}, "a.q_proj", 2),
        ({"layers.1.q": 1, "layers.2.q": 2, "1.q": 3}, "m.layers.2.q", 2),
        ({"a_b": 1, "a.b": 2}, "a_b", 1),
        ({"a.b": 2, "a_b": 1}, "a_b", 2),
        ({"q_proj": 1}, "eq_proj", None),
        ({}, "q_proj", None),
    ],
)
def test_the_first_pattern_that_matches_counts(entries: dict[str, int], path: str, value: int | None) -> None:
    assert ModulePatterns(entries).find(path) == value


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)", "lookaround"), ("(?i)a", "flag"), ("(?<!a)b", "lookaround"),
        (r"(a)\1", r"has \\1"), (r"\bq", r"has \\b"),
        ("a**", "after a quantifier"), ("a*+", "after a quantifier"), ("a{65}", "up to 64"), ("a{3,1}", "up to 64"),
        ("((a{64}){64}){64}", "repeats too much"), ("(a", "without"), ("a))", "without"), ("a)|(b", "without"),
        ("[a", "ends within"),
        ("*a", "nothing before"), ("^*", "repeats"), ("(" * 17 + ")" * 17, "nests"), ("[b-a]", "range"),
        (r"[a-\d]", "range"), ("a" * (MAX_LENGTH + 1), "characters"), ("a\\", "ends within"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        ModulePatterns({pattern: 1})


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(a|aa)+b", ".*a.*a.*a.*a.*a.*b", "(.*.*.*)*b", "((a+)+)+b"])
def test_a_pattern_that_backtracks_takes_steps_by_the_path(pattern: str) -> None:
    automaton = Automaton(pattern)
    works = [automaton.matches("a" * length)[1] for length in (250, 500)]
    assert works[0] < 50_000 and works[1] < 3 * works[0]
    assert not automaton.matches("a" * 500)[0] and automaton.matches("a" * 500 + "b")[0]


def test_patterns_over_all_modules_have_a_limit() -> None:
    """Each path brings states that none before it had."""
    chance = random.Random(1)
    patterns = ModulePatterns({"(a|b)*a" + "(a|b)" * 60: 1})
    with pytest.raises(PatternError, match="take too long"):
        for _ in range(10_000):
            patterns.find("".join(chance.choices("ab", k=500)))


def test_a_pattern_for_each_module_is_quick() -> None:
    """As EVA writes them: 20,000 look-ups of each in the others would be 400 million."""
    paths = [f"model.layers.{layer}.mlp.experts.{expert}.w1" for layer in range(40) for expert in range(500)]
    patterns = ModulePatterns({path: number for number, path in enumerate(paths)})
    assert [patterns.find(path) for path in paths] == list(range(len(paths)))
    assert patterns._work < 20 * len(paths)

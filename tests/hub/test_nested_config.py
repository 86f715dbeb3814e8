"""The configurations within the configuration: mappings, JSON and dotted names are one thing, and a typo is named."""

from typing import Any

import msgspec
import pytest

from quintet.cli.commands import serve
from quintet.config import EngineConfig, SpeculativeConfig, StructuredOutputsConfig
from quintet.config.schema import flags

ENTRIES = {"method": "ngram", "num_speculative_tokens": 3}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"speculative_config": NGRAM},
        {"speculative_config": ENTRIES},
        {"speculative_config": {"method": "[ngram]", "num-speculative-tokens": "3"}},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 3},
        {"speculative_config": {"method": "ngram"}, "speculative_config.num_speculative_tokens": 3},
        {
            "speculative_config": None,
            "speculative_config.method": "ngram",
            "speculative_config.num_speculative_tokens": 3,
        },
    ],
)
def test_every_form_makes_the_same(kwargs: dict[str, Any]) -> None:
    assert EngineConfig.from_kwargs(**kwargs).speculative_config == NGRAM


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
        ["--speculative_config.method", "ngram", "--speculative-config.num_speculative_tokens=3"],
        ["--speculative-config.method=ngram", "--speculative-config.num-speculative-tokens", "3"],
        ["-sc", '{"method": "ngram"}', "-sc.num_speculative_tokens=3"],
        ["--speculative-config", '{"method": "ngram"}', "--speculative-config.num_speculative_tokens", "3"],
    ],
)
def test_every_flag_form_makes_the_same(words: list[str]) -> None:
    assert _from_words(words).speculative_config == NGRAM


def _from_words(words: list[str]) -> EngineConfig:
    parser = flags.Parser(prog="test")
    flags.add_arguments(parser, EngineConfig)
    return flags.from_arguments(parser.parse(words), EngineConfig)


@pytest.mark.parametrize(
    ("given", "most", "least"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 7}, 7, 7),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 7, "prompt_lookup_min": 2}, 7, 2),
    ],
)
def test_what_is_looked_up_defaults_as_vllms_does(given: dict[str, Any], most: int, least: int) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=1, **given)  # type: ignore[call-arg]
    assert (config.prompt_lookup_max, config.prompt_lookup_min) == (most, least)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "speculative_config must be a JSON object"),
        (3, "speculative_config must be a mapping"),
        ({}, "speculative_config.method must be given"),
        ({"num_speculative_tokens": 3}, "speculative_config.method must be given"),
        ({"method": "ngram"}, "speculative_config.num_speculative_tokens must be given"),
        ({"method": "ngrm", "num_speculative_tokens": 3}, "did you mean 'ngram'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
        ({"methd": "ngram"}, "unknown entry of speculative_config 'methd'; did you mean 'method'"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "method='eagle3' needs speculative_config.model"),
        ({"method": "deepseek_mtp"}, "speculative_config.num_speculative_tokens must be given"),
        ({"method": "draft_model"}, "method='draft_model' needs speculative_config.model"),
        ({"method": "medusa"}, "speculative_config.method 'medusa' does not exist: vLLM has no Medusa heads"),
        ({"method": "mlp_speculator"}, "'mlp_speculator' does not exist: vLLM has no MLP speculators any more"),
        ({"method": "dspark", "num_speculative_tokens": 3}, "method='dspark' needs speculative_config.model"),
        ({"method": "gemma4_mtp"}, "method='gemma4_mtp' needs speculative_config.model"),
        ({"method": "extract_hidden_states"}, "'extract_hidden_states' does not exist: it drafts nothing, and writes"),
        ({"method": "dflash", "num_speculative_tokens": 3}, "method='dflash' needs speculative_config.model"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "model": "a/b"},
            "speculative_config.model is for draft models and heads, and the method is 'ngram'",
        ),
        ({"method": "custom_class", "num_speculative_tokens": 3}, "speculative_config.model must be given: package"),
        ({"method": "custom_class", "model": "a:B"}, "speculative_config.num_speculative_tokens must be given"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "max_tree_depth must be at least 2"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1}, "max_spec_factor must be at least 0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob must be 0 to 1"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "lower it"),
    ],
)
def test_a_wrong_speculation_is_refused_by_its_way(given: Any, says: str) -> None:
    for make in (EngineConfig, EngineConfig.from_kwargs):
        with pytest.raises(ValueError, match="^(unknown entry of )?speculative_config") as error:
            make(speculative_config=given)
        assert says in str(error.value)


def test_structured_outputs_have_defaults_and_refuse_what_is_not_there() -> None:
    assert EngineConfig().structured_outputs_config == StructuredOutputsConfig()
    assert EngineConfig(structured_outputs_config=None).structured_outputs_config.backend == "auto"  # type: ignore[arg-type]
    made = EngineConfig.from_kwargs(structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True})
    assert made.structured_outputs_config.disable_any_whitespace
    for backend, says in [("outlines", "leave it out: guidance takes EBNF"), ("guidence", "did you mean 'guidance'")]:
        with pytest.raises(ValueError, match=r"^structured_outputs_config.backend") as error:
            EngineConfig(structured_outputs_config={"backend": backend})  # type: ignore[arg-type]
        assert says in str(error.value)


def test_a_switch_within_may_stand_alone() -> None:
    name = "--structured-outputs-config.disable_any_whitespace"
    for words, want in [([name], True), ([name, "true"], True), ([f"{name}=false"], False)]:
        assert _from_words(words).structured_outputs_config.disable_any_whitespace is want


def test_a_change_keeps_the_configuration_within_or_replaces_it() -> None:
    config = EngineConfig(speculative_config=NGRAM)
    assert config.replace(seed=3).speculative_config == NGRAM
    assert config.replace(speculative_config=None).speculative_config is None


def test_it_travels_to_another_process() -> None:
    config = EngineConfig(speculative_config=NGRAM, enable_prompt_embeds=True)
    sent = msgspec.json.decode(msgspec.json.encode(config))
    assert EngineConfig(**sent) == config


def test_entries_of_a_file_and_of_flags_are_joined(tmp_path: Any) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 5\n")
    parser = flags.Parser(prog="test")
    serve.add_arguments(parser)
    words = ["--config", str(file), "--speculative-config.num_speculative_tokens", "3"]
    assert serve._settings(parser.parse(words))[1].speculative_config == NGRAM
    file.write_text("speculative_config.method: ngram\nspeculative-config.num-speculative-tokens: 3\n")
    assert serve._settings(parser.parse(words[:2]))[1].speculative_config == NGRAM


def test_a_typo_in_a_dotted_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, says in [
        ("--speculative-config.methd", "did you mean '--speculative-config.method'"),
        ("--speculative-config.code_revision", "a draft model has the model's setting of that name"),
    ]:
        with pytest.raises(SystemExit):
            _from_words([flag, "x"])
        assert says in capsys.readouterr().err


def test_an_entry_given_twice_is_refused() -> None:
    twice = {"method": "ngram", "num_speculative_tokens": 2, "prompt-lookup-max": 3, "prompt_lookup_max": 9}
    with pytest.raises(ValueError, match="gives an entry twice"):
        EngineConfig(speculative_config=twice)

"""examples/model-family as an installed package: found by its entry point, right, and proven by the kit."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
import transformers

import quintet.models
from quintet import LLM, CompletionOutput, SamplingParams
from quintet.cli import main as cli
from quintet.common.plugins import load_plugins
from quintet.conformance import kit
from quintet.conformance.harness.subject import Subject
from quintet.engine.platform_support import support_evidence
from quintet.platforms import choose
from quintet_tools.checkpoints.sizes import PLAIN
from quintet_tools.checkpoints.tiny import Tiny, make
from tests.helpers.logs import as_before

EXAMPLE = Path(__file__).parents[3] / "examples" / "model-family"
PROMPTS = [[5, 17, 3], [88, 2, 41, 9, 60, 33]]
COUNT = 20  # tokens that follow each
SIZES = {**PLAIN, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
BRANCHES = {"attention_scale": "self_attn.o_proj", "mlp_scale": "mlp.down_proj"}  # a vector -> the product before it


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The example on the path, with the metadata that pip would write. Returns its pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    info = tmp_path / "quintet_stranger-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quintet-stranger\nVersion: 0.1.0\n")
    points = project["project"]["entry-points"]["quintet.models"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[quintet.models]", *lines, ""]))
    for path in (str(tmp_path), str(EXAMPLE)):
        monkeypatch.syspath_prepend(path)
    _forget()
    yield project
    for name in [each for each in sys.modules if each.partition(".")[0] == "stranger"]:
        del sys.modules[name]
    _forget()


def _forget() -> None:
    quintet.models._plugged.cache_clear()
    load_plugins.cache_clear()


def folded(tiny: Tiny, folder: Path) -> transformers.LlamaForCausalLM:
    """transformers' Llama of the same numbers, each vector multiplied into the product before it; saved in `folder`."""
    tensors = dict(tiny.reference.state_dict())
    for name in [each for each in tensors if each.endswith("_scale")]:
        layer, _, branch = name.rpartition(".")
        tensors[f"{layer}.{BRANCHES[branch]}.weight"] = (
            tensors[f"{layer}.{BRANCHES[branch]}.weight"] * tensors.pop(name)[:, None]
        )
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).float().eval()
    model.load_state_dict(tensors)
    model.save_pretrained(folder)
    return model


def greedy(model: transformers.LlamaForCausalLM, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(COUNT):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generate(folder: Path, **settings: Any) -> list[CompletionOutput]:
    llm = LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False, logprobs=5)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def test_tokens_are_those_of_llama_with_the_vectors_folded_in(package: dict[str, Any], tmp_path: Path) -> None:
    tiny = make("stranger", SIZES)
    assert tiny.config.model_type == "stranger" and tiny.config.architectures == ["StrangerForCausalLM"]
    model = folded(tiny, tmp_path / "llama")
    tokens = [list(output.token_ids) for output in generate(tiny.folder)]
    assert tokens == [greedy(model, ids) for ids in PROMPTS]


@pytest.mark.slow
def test_two_ranks_give_the_same_tokens(package: dict[str, Any], tmp_path: Path) -> None:
    tiny = make("stranger", SIZES)
    model = folded(tiny, tmp_path / "llama")
    tokens = [list(output.token_ids) for output in generate(tiny.folder, tensor_parallel_size=2)]
    assert tokens == [greedy(model, ids) for ids in PROMPTS]


def test_int8_is_as_near_as_llamas(package: dict[str, Any], tmp_path: Path) -> None:
    """A vector behind a product is a factor of each row's scale, so that int8 rounds both models' weights alike."""
    tiny = make("stranger", SIZES)
    folded(tiny, tmp_path / "llama")
    ours, llamas = (generate(each, quantization="int8") for each in (tiny.folder, tmp_path / "llama"))
    for got, want in zip(ours, llamas, strict=True):
        assert got.logprobs is not None and want.logprobs is not None
        token = want.token_ids[0]
        assert got.token_ids[0] == token
        assert got.logprobs[0][token].logprob == pytest.approx(want.logprobs[0][token].logprob, abs=0.1)


def test_the_kit_verifies_the_family(
    package: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = ["family/stranger"]
    assert "family/stranger" in support_evidence(choose("cpu")).unproven_features("cpu", wanted)
    with as_before():
        assert cli.main(["conformance", "--device", "cpu", "--family", "stranger"]) == 0
    assert "every clause that was tried holds" in capsys.readouterr().out
    evidence = support_evidence(choose("cpu"))
    assert evidence.unproven_features("cpu", wanted) == "" and evidence.support is not None
    shown = {f"{claim}/stranger" for claim in ("family", "tokens", "bfloat16", "bits")}
    assert shown <= evidence.support.supported


def test_the_kit_finds_a_vector_that_is_not_applied(package: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from stranger.model import LayerScale  # type: ignore[import-not-found]

    monkeypatch.setattr(LayerScale, "forward", lambda self, x: x)
    report = kit.run(Subject("cpu"), ["models"], selection=kit.TrialSelection(family="stranger"))
    assert "models.families" in {result.clause for result in report.failures}


def test_without_a_reference_a_family_stays_unverified_and_the_kit_says_why(
    package: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stranger.model import StrangerForCausalLM

    monkeypatch.setattr(StrangerForCausalLM, "reference_class", None)
    (trials,) = [list(each.trials(Subject("cpu"))) for each in kit.checks(["models"]) if each.name == "families"]
    (trial,) = [each for each in trials if each.what.startswith("stranger")]
    (check,) = [each for each in kit.checks(["models"]) if each.name == "families"]
    result = kit.run_trial(check, trial)
    assert result.outcome.value == "unsupported" and not result.features
    assert "StrangerForCausalLM names no reference_class" in result.detail


def test_nothing_is_added_where_no_package_adds_it() -> None:
    whats = [each.what for check in kit.checks(["models"]) for each in check.trials(Subject("cpu"))]
    assert whats and not any("stranger" in what or "added by a package" in what for what in whats)


def test_a_family_without_trials_is_refused() -> None:
    with pytest.raises(ValueError, match="no trial of family 'stranger'"):
        kit.run(Subject("cpu"), ["models"], selection=kit.TrialSelection(family="stranger"))

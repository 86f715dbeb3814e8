"""`quintet try`: small copies of architectures, here and in transformers; what is read, and what is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from quintet.api.trial import all_types, small_copy, trial
from quintet.api.trial.shrink import shrink
from quintet.api.trial.small_copy import NEW_TOKENS, SmallCopy
from quintet.cli.main import main
from quintet.config import EngineConfig


def small(kind: str, **entries: Any) -> dict[str, Any]:
    return shrink(AutoConfig.for_model(kind, **entries).get_text_config())


def folder_of(tmp_path: Path, **entries: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    return str(tmp_path)


# ---------------------------------------------------------------------------------------------------- small configs


def reference(small: SmallCopy) -> list[tuple[list[int], list[float]]]:
    """What run_here() returns, where all is equal."""
    return list(zip(small.tokens, small.logprobs, strict=True))


def test_a_layer_of_each_kind_stays() -> None:
    made = small("gemma3_text")  # 5 windowed layers, 1 that sees all, and so on
    assert made["layer_types"] == ["sliding_attention", "full_attention"]
    assert made["num_hidden_layers"] == 2 and made["sliding_window"] < small_copy.LENGTHS[-1]
    assert made["rope_parameters"].keys() == {"full_attention", "sliding_attention"}


def test_lists_and_counts_of_layers_are_cut_alike() -> None:
    made = small("gemma3n_text")
    count = made["num_hidden_layers"]
    assert 2 <= count <= 6 and 0 < made["num_kv_shared_layers"] < count
    for name in ("layer_types", "intermediate_size", "activation_sparsity_pattern"):
        assert len(made[name]) == count
    assert set(made["activation_sparsity_pattern"]) == {0.0, 0.95}
    numbers = small("qwen3_moe", num_hidden_layers=8, mlp_only_layers=[0, 5])
    assert numbers["mlp_only_layers"] == [0] and numbers["num_hidden_layers"] == 2


def test_entries_of_single_layers_follow_their_layers() -> None:
    made = small("gemma4_text")  # layers that see all have heads twice as wide
    wide = [int(layer) for layer, entries in made["per_layer_config"].items() if entries["head_dim"] == 32]
    assert wide and made["head_dim"] == 16
    assert {made["layer_types"][layer] for layer in wide} == {"full_attention"}


@pytest.mark.parametrize(("queries", "keys", "left"), [(32, 32, 4), (32, 8, 2), (32, 1, 1)])
def test_groups_of_heads_stay_groups(queries: int, keys: int, left: int) -> None:
    made = small("llama", num_attention_heads=queries, num_key_value_heads=keys)
    assert (made["num_attention_heads"], made["num_key_value_heads"]) == (4, left)


def test_experts_groups_and_latent_heads_fit_together() -> None:
    made = small("deepseek_v3")
    assert made["n_routed_experts"] % made["n_group"] == 0 and made["topk_group"] < made["n_group"]
    assert made["num_experts_per_tok"] <= made["topk_group"] * made["n_routed_experts"] // made["n_group"]
    assert made["qk_head_dim"] == made["qk_nope_head_dim"] + made["qk_rope_head_dim"]
    assert 0 < made["first_k_dense_replace"] < made["num_hidden_layers"]  # dense layers and others


def test_sections_of_rotary_positions_keep_their_sum() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    made = small("qwen2_vl_text", hidden_size=1024, num_attention_heads=8, num_key_value_heads=2, rope_parameters=rope)
    assert sum(made["rope_parameters"]["mrope_section"]) == 8  # pairs of a head of 16
    assert made["vocab_size"] == 128 and made["hidden_size"] == 64


def test_what_stays_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_copy, "MAX_WEIGHTS", 1000)
    with pytest.raises(ValueError, match="would have .* weights, 1,000 are allowed"):
        small_copy.make_small_copy(AutoConfig.for_model("llama"), tmp_path)


@pytest.mark.parametrize(
    ("name", "verdict", "compared"),
    [
        ("llama", "llama): native", "tokens"),
        ("bitnet", "bitnet): backend", "tokens"),
        ("gemma-embedding", "gemma3_text): native", "hidden states"),
    ],
)
def test_a_gguf_file_is_tried_by_its_metadata(
    name: str, verdict: str, compared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parents[1] / "data" / "quantized" / "gguf" / f"{name}.gguf"
    assert main(["try", str(file)]) == 0
    assert capsys.readouterr().out == f"{file} ({verdict}, {compared} equal transformers'\n"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match="model.bin' is a file, and none of GGUF or whisper.cpp; give a local folder"):
        trial.try_model(EngineConfig(model=str(tmp_path / "model.bin")))


# ------------------------------------------------------------------------------------------------------ the verdict


def test_a_family_of_ours_is_native_and_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, model_type="qwen3", num_hidden_layers=40, quantization_config={"quant_method": "fp8"})
    assert main(["try", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": folder, "model_type": "qwen3", "verdict": "native", "equal": True, "reason": "", "compared": "tokens"
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_type_without_a_file_runs_by_the_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", folder_of(tmp_path, model_type="diffllama")]) == 0
    assert capsys.readouterr().out == f"{tmp_path} (diffllama): backend, tokens equal transformers'\n"


@pytest.mark.parametrize(("kind", "verdict"), [("roberta", "native"), ("ernie", "backend")])
def test_hidden_states_of_an_encoder_are_compared(
    kind: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, model_type=kind)
    assert main(["try", folder]) == 0
    assert capsys.readouterr().out == f"{tmp_path} ({kind}): {verdict}, hidden states equal transformers'\n"
    computed = trial.encode_here

    def changed(small: SmallCopy, settings: dict[str, Any]) -> list[torch.Tensor]:
        first, second = computed(small, settings)
        second[3, 5] += 0.01
        return [first, second]

    monkeypatch.setattr(trial, "encode_here", changed)
    assert main(["try", folder]) == 1
    line = capsys.readouterr().out
    assert "hidden states differ from transformers': a number of prompt 2 is" in line and "0.001 are allowed" in line


@pytest.mark.parametrize("kind", ["bart", "plbart", "marian"])  # the second's config names no first token
def test_an_encoder_decoder_of_text_is_compared(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", folder_of(tmp_path, model_type=kind)]) == 0
    assert f"({kind}): native, tokens equal" in capsys.readouterr().out


def test_an_encoder_of_sound_is_native_and_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", folder_of(tmp_path, model_type="whisper")]) == 1, "nothing was compared"
    line = capsys.readouterr().out
    assert line.startswith(f"{tmp_path} (whisper): native, ") and "equal" not in line and "its encoder hears" in line


def test_a_wrapper_is_tried_as_its_text_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_here", lambda small, settings: reference(small))
    result = trial.try_model(EngineConfig(model=folder_of(tmp_path, model_type="gemma3")))
    assert (result.model_type, result.verdict) == ("gemma3_text", "native")


def test_a_model_that_cannot_run_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", folder_of(tmp_path, model_type="xlm")]) == 1
    line = capsys.readouterr().out
    assert "(xlm): refused: " in line and "_supports_attention_backend" in line and line.count("\n") == 1


def test_a_token_that_differs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(small: SmallCopy, _: Any) -> list[tuple[list[int], list[float]]]:
        first, (second, logprobs) = reference(small)
        return [first, ([*second[:3], (second[3] + 1) % 128, *second[4:]], logprobs)]

    monkeypatch.setattr(trial, "run_here", changed)
    assert main(["try", folder_of(tmp_path, model_type="llama")]) == 1
    assert f"differ from transformers': token 4 of {NEW_TOKENS} after prompt 2 is another" in capsys.readouterr().out


def test_a_probability_that_differs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(small: SmallCopy, _: Any) -> list[tuple[list[int], list[float]]]:
        first, (second, logprobs) = reference(small)
        return [first, (second, [*logprobs[:3], logprobs[3] - 0.01, *logprobs[4:]])]

    monkeypatch.setattr(trial, "run_here", changed)
    assert main(["try", folder_of(tmp_path, model_type="llama")]) == 1
    assert "the log-probability of token 4 after prompt 2 is 0.01 off, 0.005 are allowed" in capsys.readouterr().out


def test_weights_that_differ_give_other_tokens(tmp_path: Path) -> None:
    """The comparison can fail: two random copies do not agree."""
    first, second = (
        small_copy.make_small_copy(AutoConfig.for_model("llama"), tmp_path / str(seed), seed) for seed in (0, 1)
    )
    assert trial._difference(reference(first), second)
    assert all(len(set(tokens)) > 2 for tokens in first.tokens)  # not one token for ever


# ---------------------------------------------------------------------------------------------- what is read and run


def test_an_absent_hub_id_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["try", "not/there", "--download-dir", str(tmp_path)]) == 1
    assert "HF_HUB_OFFLINE is set; unset it to download, or give a local folder" in capsys.readouterr().err
    assert main(["try", "./nothing"]) == 1
    assert "no folder './nothing' here" in capsys.readouterr().err


def test_of_the_hub_config_json_alone_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[list[str]] = []

    def snapshot(name: str, **settings: Any) -> str:
        wanted.append(settings["allow_patterns"])
        return folder_of(tmp_path, model_type="llama")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(trial, "run_here", lambda small, settings: reference(small))
    assert trial.try_model(EngineConfig(model="some/model")).passed
    assert wanted == [["config.json"]]


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    folder = folder_of(tmp_path, model_type="unheard_of", auto_map={"AutoConfig": "code.Config"})
    result = trial.try_model(EngineConfig(model=folder, trust_remote_code=True))
    assert (result.verdict, result.equal) == ("refused", None) and "was not run" in result.reason
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("words", "says"), [([], "give a MODEL, or --all"), (["a/b", "--all"], "and not both")])
def test_one_model_or_all(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", *words]) == 1
    assert says in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- all types


def test_types_after_the_end_are_not_run() -> None:
    shown: list[trial.TrialResult] = []
    results = all_types.try_all(limit=1, total=1e-9, show=shown.append, kinds=["llama", "bart"])
    assert [each.verdict for each in results] == ["not run", "not run"] and shown == results
    with pytest.raises(ValueError, match="above 0"):
        all_types.try_all(limit=0, total=1, show=shown.append)


@pytest.mark.slow
def test_each_type_has_a_process_of_its_own() -> None:
    (result,) = all_types.try_all(limit=300, total=300, show=lambda _: None, kinds=["llama"])
    assert (result.model, result.verdict, result.equal) == ("llama", "native", True)
    (result,) = all_types.try_all(limit=1e-3, total=300, show=lambda _: None, kinds=["llama"])
    assert "killed" in result.reason and result.equal is None

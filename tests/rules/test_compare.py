"""The comparison's own arithmetic: rates, shares of the roofline, ratios of pairs, the best peer, the table."""

import argparse
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import compare
from benchmarks.peers.client import Worker, WorkerError
from benchmarks.peers.figures import (
    BRIEF,
    FIGURES,
    RUNS,
    STARTUP,
    Round,
    Row,
    Run,
    Traffic,
    chosen_share,
    kv_token_bytes,
    rows,
    summary,
    table,
)
from benchmarks.peers.protocol import Job, Watch

SHORT = next(run for run in RUNS if run.name == "decode-32")
BATCH = next(run for run in RUNS if run.requests == 16)
DECODE = next(figure for figure in FIGURES if figure.run == "decode-32")
SECONDS = next(figure for figure in FIGURES if figure.kind == "startup")


def decoded(rate: float) -> dict[str, float]:
    return {"first_s": 0.1, "later_s": 32 / rate, "later_tokens": 32, "peak_rss_bytes": 2e9}


def decode_rounds(*rates: dict[str, float], read_gbs: float = 40.0) -> list[Round]:
    return [Round("bf16", "decode-32", read_gbs, {name: decoded(r) for name, r in each.items()}) for each in rates]


def row(rounds: list[Round]) -> Row:
    return Row(DECODE, SHORT, rounds)


# ------------------------------------------------------------------------------------------ one run


def test_watch_counts_from_the_moment_that_every_request_has_a_token() -> None:
    watch = Watch(2)
    for request, token in ((0, 7), (0, 8), (1, 9), (1, 10), (0, 11), (1, 12)):
        watch(request, token)
    report = watch.report(3)
    assert report["later_tokens"] == 3  # (0, 7), (0, 8) and (1, 9) came before
    assert report["tokens"] == [7, 8, 11]
    assert report["first_s"] > 0 and report["later_s"] > 0


def test_watch_refuses_a_run_that_lacks_tokens() -> None:
    watch = Watch(2)
    watch(0, 1)
    watch(0, 1)
    watch(1, 1)
    with pytest.raises(ValueError, match=r"to give 2 tokens, they gave \[1, 2\]"):
        watch.report(2)


def test_prefill_counts_the_tokens_of_every_prompt() -> None:
    prefill = next(figure for figure in FIGURES if figure.kind == "prefill")
    assert prefill.value(Run("any", 2, 512, 1), {"first_s": 2.0}) == 512.0


def test_every_figure_names_a_run() -> None:
    assert {figure.run for figure in FIGURES} == {run.name for run in (*RUNS, *BRIEF, STARTUP)}


# ------------------------------------------------------------------------------------------ the roofline


def test_cached_bytes_of_a_token_are_those_of_the_model() -> None:
    qwen = {"num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024}
    assert kv_token_bytes(qwen, 2) == 114688
    llama = {"num_hidden_layers": 16, "num_key_value_heads": 8, "hidden_size": 2048, "num_attention_heads": 32}
    assert kv_token_bytes(llama, 1) == 16384
    latent = {"num_hidden_layers": 27, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_token_bytes(latent, 2) == 27 * 1152


def test_layers_without_attention_cache_no_tokens() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["conv", "linear_attention", "full_attention"]
    assert kv_token_bytes({**config, "layer_types": kinds}, 2) == 2 * 2 * 16 * 2
    assert kv_token_bytes({**config, "layer_types": ["sliding_attention"] * 3}, 2) == 3 * 2 * 2 * 16 * 2
    assert kv_token_bytes({"num_hidden_layers": 3}, 2) == 0  # states alone


def test_roofline_reads_weights_once_a_step_and_every_context() -> None:
    alone = Traffic(weights=10**9, kv_per_token=0).roofline(SHORT, 40.0)
    assert alone == pytest.approx(40)
    context = 128 + 64 / 2
    batch = Traffic(weights=10**9, kv_per_token=100_000).roofline(BATCH, 40.0)
    assert batch == pytest.approx(16 * 40e9 / (1e9 + 16 * context * 100_000))


def test_a_step_reads_the_experts_that_its_tokens_meet() -> None:
    """Half of 1 GB are experts'; a token meets a quarter of them, 16 tokens nearly all."""
    traffic = Traffic(10**9, 0, experts=0.5, chosen=0.25)
    assert traffic.roofline(SHORT, 40.0) == pytest.approx(40 / 0.625)
    assert traffic.roofline(BATCH, 40.0) == pytest.approx(16 * 40 / (1 - 0.5 * 0.75**16))


def test_the_experts_share_is_of_the_checkpoints_bytes(tmp_path: Path) -> None:
    names = {"model.embed_tokens.weight": 6, "model.layers.0.mlp.experts.0.up_proj.weight": 2}
    save_file({name: torch.ones(size, 4) for name, size in names.items()}, tmp_path / "model.safetensors")
    assert compare.experts_share(tmp_path) == 0.25


def test_a_token_meets_so_many_of_the_experts() -> None:
    assert chosen_share({"num_experts": 128, "num_experts_per_tok": 8}) == 1 / 16
    assert chosen_share({"num_local_experts": 8, "num_experts_per_tok": 2}) == 1 / 4
    assert chosen_share({"num_attention_heads": 8}) == 1


def test_share_is_taken_at_the_bandwidth_of_the_same_round() -> None:
    halves = decode_rounds({"quintet bf16": 20}, read_gbs=40) + decode_rounds({"quintet bf16": 5}, read_gbs=10)
    assert row(halves).share("quintet bf16", Traffic(10**9, 0)) == pytest.approx(0.5)


def test_no_share_where_memory_is_not_the_bound() -> None:
    started = [Round("bf16", "startup", 40.0, {"quintet bf16": {"startup_s": 2.0}})]
    assert Row(SECONDS, STARTUP, started).share("quintet bf16", Traffic(10**9, 0)) is None


# ------------------------------------------------------------------------------------------ ratios


def test_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    rounds = decode_rounds(
        {"quintet bf16": 10, "a x": 20}, {"quintet bf16": 30, "a x": 10}, {"quintet bf16": 40, "a x": 40}
    )
    found = row(rounds)
    assert found.ratios("quintet bf16", "a x") == pytest.approx([0.5, 3, 1])
    assert summary(found, dict.fromkeys(found.labels(), Traffic(1, 0)))["median_ratios"] == {
        "quintet bf16 / a x": pytest.approx(1)
    }


def test_ratio_above_one_is_better_for_seconds_too() -> None:
    results = {"quintet bf16": {"startup_s": 2.0}, "a x": {"startup_s": 3.0}, "b x": {"startup_s": 4.0}}
    found = Row(SECONDS, STARTUP, [Round("bf16", "startup", 40.0, results)])
    assert found.best_peer() == "a x"
    assert found.ratios("quintet bf16", "a x") == [1.5]


def test_best_peer_has_the_best_median_and_is_never_ours() -> None:
    rounds = decode_rounds({"quintet bf16": 99, "a x": 50, "b x": 30}, {"a x": 10, "b x": 31}, {"a x": 10, "b x": 29})
    assert row(rounds).best_peer() == "b x"
    assert row(decode_rounds({"quintet bf16": 99})).best_peer() is None


def test_a_round_that_lacks_either_makes_no_pair() -> None:
    rounds = decode_rounds({"quintet bf16": 10}, {"quintet bf16": 20, "a x": 10}, {"a x": 10})
    assert row(rounds).ratios("quintet bf16", "a x") == pytest.approx([2])


# ------------------------------------------------------------------------------------------ the table


def test_table_shows_medians_shares_and_the_ratio_with_its_range() -> None:
    rounds = decode_rounds(
        {"quintet bf16": 30, "a x": 20}, {"quintet bf16": 30, "a x": 15}, {"quintet bf16": 30, "a x": 12}
    )
    text = table(rounds, "bf16", {"quintet bf16": Traffic(10**9, 0), "a x": Traffic(2 * 10**9, 0)})
    head, rule, line = text.splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == [
        "bf16",
        "quintet bf16",
        "a x",
        "quintet bf16 / best peer",
    ]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        DECODE.title,
        "30 (75%)",
        "15 (75%)",
        "2.00 (1.50-2.50) of a x",
    ]
    assert len({len(each) for each in (head, rule, line)}) == 1


def test_what_was_measured_before_a_change_is_the_peer_of_the_same_setting() -> None:
    rounds = decode_rounds({"quintet int8": 30, "before int8": 20, "before w8a8": 60})
    text = table(rounds, "bf16", dict.fromkeys(["quintet int8", "before int8", "before w8a8"], Traffic(10**9, 0)))
    assert text.splitlines()[-1].split("|")[-2].strip() == "1.50 (1.50-1.50) of before int8"


def test_table_has_a_place_for_whoever_dropped_out() -> None:
    rounds = decode_rounds({"quintet bf16": 30, "a x": 20})
    rounds.append(Round("bf16", "startup", 40.0, {"quintet bf16": {"startup_s": 2.0, "peak_rss_bytes": 2e9}}))
    text = table(rounds, "bf16", {"quintet bf16": Traffic(10**9, 0), "a x": Traffic(10**9, 0)})
    startup = next(line for line in text.splitlines() if SECONDS.title in line)
    assert [cell.strip() for cell in startup.split("|")[2:-1]] == ["2", "-", "-"]


def test_rows_are_of_the_bits_asked_for() -> None:
    rounds = decode_rounds({"quintet bf16": 30})
    assert [each.figure for each in rows(rounds, "bf16")] == [DECODE]
    assert list(rows(rounds, "int8")) == []


# ------------------------------------------------------------------------------------------ processes


def test_a_peer_that_is_not_installed_says_why(tmp_path: Path) -> None:
    job = Job("quintet", "bf16", "bf16", str(tmp_path / "nowhere"), str(tmp_path), 1)
    plain = [sys.executable, "-S"]  # no site-packages: what an environment without the peer looks like
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(plain)} "$@"\n')
    wrapper.chmod(0o755)
    with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'torch'"):
        Worker(job, str(wrapper), tmp_path / "log").ready()


# ------------------------------------------------------------------------------------------ the script


def test_a_peer_that_ended_is_closed_like_others(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text("#!/bin/sh\nexit 3\n")
    wrapper.chmod(0o755)
    worker = Worker(Job("llama.cpp", "bf16", "BF16", "", str(tmp_path), 1), str(wrapper), tmp_path / "log")
    worker._process.wait()
    with pytest.raises(WorkerError, match="ended with status 3"):
        worker.run([[1] * 100_000], 1)
    worker.close()


def test_a_peer_is_a_known_name_and_an_interpreter() -> None:
    assert compare.peer("llama.cpp=/a/bin/python") == ("llama.cpp", "/a/bin/python")
    for wrong in ("tinygrad=python", "openvino", "openvino="):
        with pytest.raises(
            argparse.ArgumentTypeError, match=r"is not NAME=PYTHON with a NAME of before, transformers, llama\.cpp"
        ):
            compare.peer(wrong)


def test_no_prompt_comes_twice() -> None:
    made = [tuple(prompt) for index in range(6) for prompt in compare.prompts(BATCH, index)]
    assert len(set(made)) == 6 * 16
    assert {len(prompt) for prompt in made} == {128}


def test_first_tokens_are_held_against_ours(tmp_path: Path) -> None:
    bench = compare.Bench(tmp_path, tmp_path, threads=1, pairs=2, interpreters={})
    bench.rounds = [
        Round("bf16", "decode-32", 40.0, {"a x": {"tokens": [5]}, "quintet bf16": {"tokens": [5]}}),
        Round("bf16", "decode-32", 40.0, {"a x": {"tokens": [6]}, "quintet bf16": {"tokens": [5]}}),
        Round("bf16", "decode-32", 40.0, {"a x": {"tokens": [6]}}),
        Round("int8", "decode-32", 40.0, {"a x": {"tokens": [5]}, "quintet int8": {"tokens": [5]}}),
    ]
    assert compare.same_tokens(bench, "bf16") == {"a x": "1 of 2", "quintet bf16": "2 of 2"}


def test_a_setting_without_an_interpreter_is_listed_with_the_reason(tmp_path: Path) -> None:
    bench = compare.Bench(tmp_path, tmp_path, threads=1, pairs=1, interpreters={})
    assert compare.load(bench, "int8") == {}
    assert bench.missing["llama.cpp Q8_0"] == "not named: give --peer llama.cpp=PYTHON"
    assert set(bench.missing) == {"quintet int8", "quintet w8a8", "llama.cpp Q8_0", "openvino int8", "vllm w8a8"}

"""`quintet bench simulate`: what is measured, played, found and refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import main as cli
from quintet.clients.http_client import run
from quintet.config import EngineConfig
from quintet_tools.simulate.capacity import Goal, fewest
from quintet_tools.simulate.measuring_client import Caller, Server

COSTS = {"shape": {"max_model_len": 256, "num_pages": 400, "max_num_seqs": 8}, "step": [[1, 0.01], [256, 0.1]]}


@pytest.fixture
def costs(tmp_path: Path) -> str:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS))
    return str(file)


def figures(tmp_path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert cli.main(["bench", "simulate", "--json", str(file), *words]) == code
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_what_is_measured_can_be_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "measured.json")
    null = ["--device", "null", "--load-format", "dummy", "--max-model-len", "64", "--num-pages", "64"]
    words = ["bench", "simulate", "--measure", "bundled", "-o", file, *null, "--max-num-seqs", "4"]
    assert cli.main(words) == 0
    assert "tokens of a step" in capsys.readouterr().out
    found = json.loads(Path(file).read_text())
    assert found["shape"] | {"num_pages": 0} == {
        "max_model_len": 64, "num_pages": 0, "page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 2048,
        "windows": [None], "num_slots": 0, "overlap": False,
    }  # fmt: skip
    assert found["measured"]["device"] == "null" and found["measured"]["samples"] >= 8
    assert [size for size, _ in found["step"]] == [1, 2, 4, 8, 16, 32, 63]
    assert found["latency"] >= 0 and sum(found["spread"]) == pytest.approx(len(found["spread"]), abs=0.01)
    played = figures(tmp_path, "--costs", file, "--num-prompts", "6", "--input-len", "20", "--output-len", "5")
    assert played["completed"] == 6 and played["total_output_tokens"] == 30


@pytest.mark.slow
def test_a_server_of_several_engines_is_measured_while_all_compute(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    words = ["--device", "cpu", "--max-model-len", "32", "--num-pages", "64", "--max-num-seqs", "1", "-dp", "2"]
    assert cli.main(["bench", "simulate", "--measure", "bundled", "-o", str(file), *words]) == 0
    found = json.loads(file.read_text())
    assert len(found["sharing"]) == 2 and found["sharing"][0] == 1 <= found["sharing"][1]


@pytest.mark.slow
def test_a_server_that_does_not_start_ends_the_measuring(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=str(tmp_path / "nowhere"), device="null")
    server = Server(config)

    async def asked() -> None:
        async with Caller(server, config, 10):
            raise AssertionError("it serves")

    try:
        with pytest.raises(ValueError, match="did not start, or has ended"):
            run(asked())
    finally:
        server.close()
    assert "nowhere" in capfd.readouterr().err


def test_figures_have_the_names_of_bench_serve(tmp_path: Path, costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(tmp_path, "--costs", costs, "--num-prompts", "20", "--request-rate", "5", "-dp", "2",
                    "--goodput", "ttft:100", "e2el:60000")  # fmt: skip
    for metric in ("ttft", "tpot", "itl", "e2el", "queue"):
        assert found[f"mean_{metric}_ms"] >= 0 and f"p99_{metric}_ms" in found
    assert found["total_input_tokens"] == 20 * 128 and len(found["utilization"]) == 2
    assert found["goodput_share"] <= 1 and found["requests_by_engine"] == [10, 10]
    assert "TTFT, to the first token" in capsys.readouterr().out


def test_the_fewest_engines_that_keep_a_goal_are_found(
    tmp_path: Path, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--costs", costs, "--num-prompts", "60", "--request-rate", "40", "--output-len", "64"]
    found = figures(tmp_path, *load, "--find", "engines", "--goal", "ttft_p99=0.3", "tpot_mean=0.1")
    engines, tried = found["engines"], {int(count): each for count, each in found["tried"].items()}
    assert engines > 1 and tried[engines]["p99_ttft_ms"] <= 300
    assert all(each["p99_ttft_ms"] > 300 for count, each in tried.items() if count < engines)
    assert f"{engines} engines" in capsys.readouterr().out
    found = figures(tmp_path, *load, "--find", "engines", "--goal", "ttft_p99=0.001", code=1)
    assert found["engines"] is None
    assert "no number of engines up to 60 keeps the goal" in capsys.readouterr().err
    found = figures(tmp_path, *load, "--find", "engines", "--goodput", "ttft:200", "--goal", "goodput=0.9")
    assert found["tried"][str(found["engines"])]["goodput_share"] >= 0.9


@pytest.mark.parametrize("least", [1, 2, 3, 7, 8, 9, 16])
def test_the_search_ends_at_the_least(least: int) -> None:
    goal = Goal.of("ttft_p99=1")
    found, tried = fewest(lambda count: {"p99_ttft_ms": 0 if count >= least else 2000}, [goal], 16)
    assert found == least and len(tried) <= 9
    assert fewest(lambda count: {"p99_ttft_ms": 2000}, [goal], 16)[0] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "costs are missing"),
        (["--measure", "bundled"], "say where with -o FILE"),
        (["--costs", "{costs}", "-o", "x"], "for figures give --json"),
        (["--costs", "{costs}", "--find", "engines"], "belong together"),
        (["--costs", "{costs}", "--goal", "ttft_p99=1"], "belong together"),
        (["--costs", "{costs}", "--find", "engines", "--goal", "goodput=0.9"], "give both"),
        (["--costs", "{costs}", "--dtype", "float32"], "is settled when costs are measured"),
        (["--costs", "{costs}", "--trace", "t", "--request-rate", "1"], "leave one of them out"),
        (["--costs", "{costs}", "--trace-speed", "2"], "of a trace"),
        (["--costs", "{costs}", "--input-len", "250"], "100 of 100 requests are longer than --max-model-len 256"),
        (["--costs", "{costs}", "--max-model-len", "16K"], "do not hold one request"),
        (["--costs", "{costs}", "--max-model-len", "auto"], "here is none"),
        (["--costs", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_played_says_why(
    words: list[str], says: str, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "simulate", *(word.replace("{costs}", costs) for word in words)]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("ttft_p98=1", "did you mean 'ttft_p9"),
        ("latency=1", "unknown goal 'latency'"),
        ("ttft_p99", "seconds over 0"),
        ("ttft_p99=-1", "seconds over 0"),
        ("goodput=2", "a share up to 1"),
    ],
)
def test_wrong_goals_are_refused(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "simulate", "--goal", word])
    assert says in capsys.readouterr().err

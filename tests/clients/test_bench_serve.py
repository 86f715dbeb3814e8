"""`quintet bench serve`: what is sent, which chunks count, and the arithmetic of its figures."""

import itertools
import json
import math
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import main as cli
from quintet.clients import http_client as http_stream
from quintet.clients.errors import ServerError
from quintet.clients.http_client import HttpClient, ServerAddress
from quintet.clients.latency import LoadResult, RequestOutcome, StreamTimes
from quintet.clients.load_datasets import dataset_requests, read_dataset, read_sharegpt
from quintet.clients.load_generator import RandomPrompts, RequestSource, Sender, arrival_times
from tests.clients.conftest import KEY, Fake


def bench(fake: Fake, tmp_path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert cli.main(["bench", "serve", "--url", fake.url, "--json", str(file), *words]) == code
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_figures_come_of_every_answer(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "5", "--input-len", "9", "--output-len", "4", "--ignore-eos", "--warmup", "2"]
    figures = bench(fake, tmp_path, *words, "--goodput", "ttft:60000", "tpot:60000", "--extra-body", '{"top_k": 3}')
    assert (figures["completed"], figures["failed"], figures["failures"]) == (5, 0, {})
    assert (figures["total_input_tokens"], figures["total_output_tokens"], figures["chunks"]) == (35, 20, 20)
    assert figures["token_counts"] == {"usage": 5}
    assert figures["request_goodput"] == figures["request_throughput"] == 5 / figures["duration"]
    assert figures["total_token_throughput"] == pytest.approx(55 / figures["duration"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        ranked = [figures[f"{share}_{metric}_ms"] for share in ("median", "p90", "p95", "p99")]
        assert ranked == sorted(ranked)
        assert ranked[0] > 0 or metric in ("tpot", "itl")  # chunks that are read at once have no time between them
        assert f"mean_{metric}_ms" in figures
    page = capsys.readouterr().out
    assert "TTFT, to the first token" in page and "usage in 5 answers" in page
    bodies = fake.bodies()
    assert len(bodies) == 7  # with two to warm up
    assert len({tuple(body["prompt"]) for body in bodies}) == 7
    assert all(len(body["prompt"]) == 9 and max(body["prompt"]) < 1000 for body in bodies)
    assert bodies[0] | {"prompt": None} == {
        "model": "echo", "prompt": None, "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, "top_k": 3,
    }  # fmt: skip


def test_chats_are_timed_from_their_first_words(fake: Fake, tmp_path: Path) -> None:
    figures = bench(fake, tmp_path, "--endpoint", "chat", "--num-prompts", "3", "--input-len", "6", "--output-len", "5")
    assert figures["endpoint"] == "chat"
    assert figures["chunks"] == 15  # the role is none
    assert {asked.path for asked in fake.asked[1:]} == {"/v1/chat/completions"}
    assert len(fake.bodies()[0]["messages"][0]["content"].split()) == 6


def test_chunks_stand_in_where_a_server_counts_no_tokens(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "no-usage", "--num-prompts", "2", "--input-len", "8", "--output-len", "3", "--uds", fake.uds]
    figures = bench(fake, tmp_path, *words)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (16, 6)
    assert figures["token_counts"] == {"chunks": 2}
    assert "chunks in 2 answers" in capsys.readouterr().out


def test_no_more_go_out_than_may(fake: Fake, tmp_path: Path) -> None:
    bench(fake, tmp_path, "--num-prompts", "20", "--max-concurrency", "3", "--output-len", "2")
    assert fake.most_under_way <= 3
    assert fake.connections <= 5  # three, one for the list of models and one for the warm-up


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("breaks-off", "broken off"),
        ("ends-early", "broken off"),
        ("fails-midway", "error in stream"),
        ("bad-chunk", "not HTTP"),
        ("bad-event", "not OpenAI"),
        ("html", "not OpenAI"),
        ("fault", "HTTP 500"),
        ("hangs-up", "broken off"),
    ],
)
def test_failures_are_counted_by_kind(
    fake: Fake, tmp_path: Path, model: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = bench(fake, tmp_path, "-m", model, "--num-prompts", "2", "--warmup", "0", code=1)
    assert figures["failures"] == {kind: 2} and figures["completed"] == 0
    assert f"2 failed ({kind})" in capsys.readouterr().err


def test_a_server_that_is_busy_is_a_failure_with_a_name(fake: Fake, tmp_path: Path) -> None:
    fake.busy = 2
    figures = bench(fake, tmp_path, "-m", "busy", "--num-prompts", "5", "--warmup", "0", code=1)
    assert (figures["failures"], figures["completed"]) == ({"HTTP 429": 2}, 3)


def test_the_first_request_must_succeed(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--url", fake.url, "-m", "fault"]) == 1
    assert "answered 500: it broke" in capsys.readouterr().err
    assert len(fake.asked) == 1
    fake.key = KEY
    assert cli.main(["bench", "serve", "--url", fake.url, "-m", "echo"]) == 1
    assert "401" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    assert "quintet serve --port 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--request-rate", "0"], "over 0"),
        (["--request-rate", "nan"], "over 0"),
        (["--goodput", "tftt:5"], "METRIC:MILLISECONDS"),
        (["--goodput", "ttft"], "METRIC:MILLISECONDS"),
        (["--endpoint", "chats"], "one of completions, chat"),
        (["--num-prompts", "0"], "at least 1"),
        (["--max-concurency", "1"], "did you mean '--max-concurrency'"),
    ],
)
def test_wrong_words(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", *words])
    assert says in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- dataset


def dataset(tmp_path: Path, *lines: Any) -> str:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def test_a_dataset_settles_prompts_lengths_and_endpoint(fake: Fake, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = dataset(tmp_path, {"messages": messages, "output_len": 2}, "", {"prompt": "once"})
    figures = bench(fake, tmp_path, "--dataset", file, "--warmup", "0", "--output-len", "7", "--max-concurrency", "1")
    assert (figures["endpoint"], figures["num_prompts"]) == ("chat", 2)
    first, second = fake.bodies()
    assert (first["messages"], first["max_tokens"]) == (messages, 2)
    assert (second["messages"][0]["content"], second["max_tokens"]) == ("once", 7)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "line 2: Expecting value"),
        ([1], "must be an object"),
        ({"promt": "x"}, "did you mean 'prompt'"),
        ({"output_len": 1}, "either prompt or messages"),
        ({"prompt": "x", "output_len": 0}, "output_len must be"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_wrong_dataset_is_refused_with_its_line(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        read_dataset(dataset(tmp_path, {"prompt": "x"}, line))
    assert says in str(error.value)


def test_a_dataset_is_never_stretched(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = dataset(tmp_path, {"prompt": "x"})
    assert cli.main(["bench", "serve", "--url", fake.url, "--dataset", file, "--num-prompts", "2"]) == 1
    assert "holds 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--endpoint chat"):
        dataset_requests([{"messages": []}], RequestSource("m", "completions"), 1)
    with pytest.raises(ValueError, match="no prompts"):
        read_dataset(dataset(tmp_path, ""))


# ----------------------------------------------------------------------------------------------------- vLLM's flags


def test_a_command_line_of_vllm_is_taken(fake: Fake, tmp_path: Path) -> None:
    words = (
        f"bench serve --backend openai-chat --base-url http://127.0.0.1:{fake.port}/v1 --endpoint /v1/chat/completions "
        "--dataset-name random --random-input-len 20 --random-output-len 10 --random-range-ratio 0.5 "
        "--random-prefix-len 4 --num-prompts 30 --num-warmups 1 --request-rate inf --max-concurrency 4 --seed 3 "
        f"--disable-tqdm --save-result --result-dir {tmp_path} --result-filename found.json"
    )
    assert cli.main(words.split()) == 0
    figures = json.loads((tmp_path / "found.json").read_text())
    assert (figures["completed"], figures["endpoint"]) == (30, "chat")
    texts = [body["messages"][0]["content"].split() for body in fake.bodies()]
    assert len({tuple(each[:4]) for each in texts}) == 1 and len({tuple(each[4:]) for each in texts}) == 31
    assert all(10 <= len(each) - 4 <= 30 for each in texts) and len({len(each) for each in texts}) > 5
    assert {5 <= body["max_tokens"] <= 15 for body in fake.bodies()} == {True}
    assert fake.most_under_way <= 4


def test_host_and_port_name_the_server(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--backend", "vllm", "--host", "127.0.0.1", "--port", str(fake.port)]
    assert (
        cli.main([*words, "--num-prompts", "2", "--output-len", "2", "--save-result", "--result-dir", str(tmp_path)])
        == 0
    )
    (file,) = tmp_path.glob("vllm-infqps-echo-*.json")
    assert json.loads(file.read_text())["completed"] == 2
    assert cli.main([*words, "--base-url", fake.url]) == 1
    assert "give one address" in capsys.readouterr().err


def test_sharegpt_is_read_with_vllms_bounds(tmp_path: Path) -> None:
    def entry(*words: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": each} for each in words]}

    long, short = "w " * 1025, "a b c"
    whole = [
        entry("one two three four", "five six seven eight nine", "more"),
        entry("p q r s t", short),
        entry("alone"),
    ]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([*whole, entry(long, "a b c d"), entry("a b c d", "w " * 2045), {"id": 1}]))

    def count(text: str) -> int:
        return len(text.split())

    assert read_sharegpt(str(file), count, 10, None, 0) == [{"prompt": "one two three four", "output_len": 5}]
    fixed = read_sharegpt(str(file), count, 10, 7, 0)
    assert sorted(each["prompt"] for each in fixed) == ["a b c d", "one two three four", "p q r s t"]
    assert {each["output_len"] for each in fixed} == {7}
    assert len(read_sharegpt(str(file), count, 2, 7, 0)) == 2
    file.write_text("[]")
    with pytest.raises(ValueError, match="holds no conversations"):
        read_sharegpt(str(file), count, 1, None, 0)


def test_lines_may_have_vllms_name_of_the_length(tmp_path: Path) -> None:
    assert read_dataset(dataset(tmp_path, {"prompt": "a", "output_tokens": 3})) == [{"prompt": "a", "output_len": 3}]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dataset-name", "sharegpt"], "needs a file; give --dataset-path FILE"),
        (["--dataset-name", "random", "--dataset-path", "x"], "give one of them"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "and --endpoint completions; give one"),
    ],
)
def test_flags_that_contradict_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", *words]) == 1
    assert says in capsys.readouterr().err


def test_bursts_keep_the_rate() -> None:
    times = list(arrival_times(20_000, 10.0, 1, 0.25))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.05)
    assert sum((each - mean) ** 2 for each in gaps) / len(gaps) == pytest.approx(mean**2 / 0.25, rel=0.1)


def test_the_seed_settles_prompts_and_times() -> None:
    source, drawn = RequestSource("m", "completions"), RandomPrompts(20, 5, 100, False, 1)
    assert drawn.make_requests(source, 3) == drawn.make_requests(source, 3)
    assert drawn.make_requests(source, 3) != RandomPrompts(20, 5, 100, False, 2).make_requests(source, 3)
    assert [*arrival_times(5, 2.0, 7)] == [*arrival_times(5, 2.0, 7)] != [*arrival_times(5, 2.0, 8)]
    assert [*arrival_times(3, math.inf, 0)] == [0.0, 0.0, 0.0]


def test_arrivals_are_a_poisson_process() -> None:
    times = [*arrival_times(20_001, 50.0, 0)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)  # as with an exponential distribution, and no other that is even


def test_requests_set_out_at_their_times(fake: Fake) -> None:
    async def work() -> list[RequestOutcome]:
        client = HttpClient(ServerAddress("127.0.0.1", fake.port))
        sender = Sender(client, fake.url, "completions")
        call = RandomPrompts(3, 2, 10, False, 0).make_requests(RequestSource("echo", "completions"), 3)
        found = await sender.send_all(call, iter([0.0, 0.05, 0.1]), None, lambda: None)
        client.close()
        return found

    begun = time.perf_counter()
    started = [outcome.started for outcome in http_stream.run(work())]
    assert started[1] - begun >= 0.045 and started[2] - begun >= 0.095


# ----------------------------------------------------------------------------------------------------------- chunks


def heard(*events: Any) -> StreamTimes:
    stream = StreamTimes("there")
    for at, event in enumerate(events):
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        stream.feed(b"data: " + data + b"\n\n", float(at))
    return stream


def chunk(reason: str | None = None, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **choice, "finish_reason": reason}]}


def test_only_chunks_of_output_count() -> None:
    said, usage = {"content": "x"}, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    role = {"role": "assistant", "content": ""}
    stream = heard(chunk(delta=role), chunk(delta=said), chunk(delta=said), chunk("stop", delta={}), usage, b"[DONE]")
    assert [*stream.times] == [1.0, 2.0]
    assert stream.usage == usage["usage"]
    assert [*heard(chunk(text=""), chunk(text="x"), chunk("stop", text="")).times] == [0.0, 1.0]
    assert [*heard(chunk(text="a"), chunk("length", text="b")).times] == [0.0, 1.0]
    assert [*heard(chunk(delta=role), chunk(delta={"reasoning_content": "hm"})).times] == [1.0]
    assert [*heard({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}).times] == [0.0, 1.0]


def test_usage_that_is_null_or_repeated_changes_nothing() -> None:
    each = {**chunk(text="x"), "usage": None}
    assert [*heard(each, each, each).times] == [0.0, 1.0, 2.0]
    grown = [{**chunk(text="x"), "usage": {"prompt_tokens": 1, "completion_tokens": at}} for at in (1, 2)]
    stream = heard(*grown)
    assert [*stream.times] == [0.0, 1.0] and stream.usage["completion_tokens"] == 2


@pytest.mark.parametrize("event", [b"{", b"1", b"[]", b'{"choices": 5}', b'{"choices": [1]}', b"[" * 100_000])
def test_what_is_no_chunk_is_refused(event: bytes) -> None:
    with pytest.raises(ServerError, match="no chunk of an answer"):
        heard(event)


def test_an_answer_without_a_letter_is_timed_by_its_end() -> None:
    stream = heard(chunk(delta={"role": "assistant", "content": ""}), chunk("stop", delta={}))
    stream.finish()
    assert [*stream.times] == [1.0]


def test_an_answer_without_a_token_is_a_failure() -> None:
    with pytest.raises(ServerError, match="without a token"):
        heard({"choices": []}, b"[DONE]").finish()


def outcome(started: float, *times: float, tokens: int) -> RequestOutcome:
    return RequestOutcome(started, array("d", times), 10, tokens)


def test_the_arithmetic_of_the_figures() -> None:
    first, second = outcome(1.0, 1.5, 2.0, 3.5, tokens=5), outcome(2.0, 3.0, tokens=1)
    failed = RequestOutcome(0.0, failure=ServerError("HTTP 500", "x"))
    figures = LoadResult([first, second, failed], 4.0, 0.002).figures({"ttft": 0.6, "tpot": 0.6})
    assert (figures["completed"], figures["failed"], figures["failures"]) == (2, 1, {"HTTP 500": 1})
    assert (figures["mean_ttft_ms"], figures["p99_ttft_ms"]) == (750.0, 1000.0)
    assert figures["mean_tpot_ms"] == 500.0  # 2 s over four tokens; one token has none
    assert (figures["mean_itl_ms"], figures["p99_itl_ms"]) == (1000.0, 1500.0)
    assert figures["median_e2el_ms"] == 1000.0 and figures["p99_e2el_ms"] == 2500.0
    assert (figures["output_throughput"], figures["total_token_throughput"]) == (1.5, 6.5)
    assert figures["request_goodput"] == 0.25
    assert figures["client_cpu_us_per_chunk"] == 500.0


def test_nothing_answered_has_figures_too() -> None:
    figures = LoadResult([RequestOutcome(0.0, failure=ServerError("timeout", "x"))], 1.0, 0.1).figures({})
    assert figures["completed"] == 0 and "mean_ttft_ms" not in figures
    assert figures["client_cpu_us_per_chunk"] is None

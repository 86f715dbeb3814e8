"""What a command refuses, in the words of whoever typed it: flags as typed, keys with their file, in one line."""

import argparse
import importlib
import shlex
from pathlib import Path

import pytest

from quintet import LLM
from quintet.cli import main as cli
from quintet.cli.commands import _local_server as _local
from quintet.config.schema import flags
from quintet.config.schema.error_names import NameTranslation, Spelling
from tests.helpers.servers.serving import NULL, PATIENCE, Server
from tests.server.test_serve_command import refused

START = {"generate": ["x"], "transcribe": ["x"], "run-batch": ["-i", "in", "-o", "out"]}
COMMANDS = (
    "serve",
    "generate",
    "chat",
    "complete",
    "bench latency",
    "bench throughput",
    "bench serve",
    "explain",
    "router",
)
# Any text will do, or the list is checked as a whole: those that can be wrong are below.
TAKE_ANYTHING = {
    "--lora-modules", "--lora-hub-repos", "--lora-path", "--lora-target-modules",
    "--disable-access-log-for-endpoints", "--kv-events-config.topic",
    "--profiler-config.torch-profiler-dir", "--middleware", "--endpoint-plugins",
    "--config", "--root-path", "--system", "--prompts-file", "--served-model-name", "--api-key", "--allowed-origins",
    "--allowed-hosts", "--tool-server", "--tools", "--allow-tool", "--chat-template-kwargs", "--tool-call-parser",
    "--reasoning-parser", "--allowed-media-domains", "--image",
    "--logits-processors", "--stop", "--bad-words", "--compilation-config.cache-dir", "--input-file", "-i",
    "--output-file", "-o", "--ignore-patterns", "--backend", "--worker-urls", "--static-backends",
    "--prefill", "--decode", "--encode", "--backend-ca-certs", "--language", "--prompt", "--output",
    "--against-model", "--reference", "--logprobs",
}  # fmt: skip
NONSENSE = ("", "{", "-7x")  # one of them is wrong for every other flag


def parser(command: str) -> flags.Parser:
    made = flags.Parser(prog=f"quintet {command}")
    importlib.import_module(cli.COMMANDS[command].module).add_arguments(made)
    return made


@pytest.mark.grid(cases=4)
@pytest.mark.parametrize("command", [*COMMANDS, "run-batch", "transcribe"])
def test_every_flag_is_named_as_it_was_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag under each of its names, with a wrong value; with underscores too."""
    took: set[str] = set()
    reader = parser(command)
    for flag, action in reader._option_string_actions.items():
        if isinstance(action, argparse._HelpAction):
            continue
        for typed in {flag, "--" + flag[2:].replace("-", "_")} if flag.startswith("--") else {flag}:
            if not any(refuses(reader, [*START.get(command, []), f"{typed}={wrong}"]) for wrong in NONSENSE):
                took.add(flag)
                continue
            first, hint = capsys.readouterr().err.splitlines()
            assert first.startswith(f"quintet {command}: error: argument {typed}: "), first
            assert hint.startswith(f"`quintet {command} --help`")
    assert took <= TAKE_ANYTHING | ({"--model", "-m"} if command == "complete" else set())


def refuses(reader: flags.Parser, words: list[str]) -> bool:
    try:
        reader.parse(words)
    except SystemExit as end:
        assert end.code == 2
        return True
    return False


# what is typed, what the message begins with
EXPLAIN = [
    ("--max-model-len 999999999", "--max-model-len 999999999 is beyond the model's 1024 tokens; lower it, or scale its "
     "rotary positions with --hf-overrides '{\"rope_scaling\""),
    ("--max_model_len 999999999", "--max_model_len 999999999 is"),
    ("-tp 400", "-tp must be 1"),
    ("--enforce-eager --capture-ahead", "--enforce-eager captures nothing, so --capture-ahead means nothing"),
    ("--enforce-eager --cudagraph-capture-sizes 1 2",
     "--enforce-eager captures nothing, so --cudagraph-capture-sizes 1 2"),
    ("--num-gpu-blocks-override 2", "KV cache needs 65 pages of 0.05 MiB for one request of --max-model-len, 2 fit: "
     "--num-gpu-blocks-override 2; lower --max-model-len to 16"),
    ("--kv-cache-memory-bytes 1 --num-pages 4", "--num-pages and --kv-cache-memory-bytes both"),
    ("--gpu-memory-utilization 0.000001", "KV cache needs 65 pages of 0.05 MiB for one request of --max-model-len, 0"),
    ("--dtype float16", "--dtype float16 is not among"),
    ("--quantization int4", "--quantization int4 is not there"),
    ("--quantization-group-size 64", "--quantization-group-size means nothing with no --quantization, where"),
    ("--attention-backend nonsense", "--attention-backend: 'nonsense' was asked for"),
    ("--generation-config /nowhere", "--generation-config /nowhere is not"),
    ("--override-generation-config '{\"bad\": 1, \"worse\": 2}'",
     "unknown entry of --override-generation-config 'bad'"),
    ("--hf-overrides '{\"hidden_size\": -1}'", "--hf-overrides: hidden_size is -1"),
    ("--long-prefill-token-threshold 99999", "--long-prefill-token-threshold 99999 is beyond --max-model-len 1024"),
    ("--max-num-partial-prefills 2 --no-enable-chunked-prefill", "--max-num-partial-prefills says how prompts are cut, "
     "and --no-enable-chunked-prefill cuts none"),
    ("--device nonsense", "--device: unknown device 'nonsense'"),
    ("-m /nowhere", "-m: no folder '/nowhere' here"),
    ("--compilation-config '{\"mode\": 1}'", "--compilation-config.mode 1 asks for torch.compile"),
    ("-cc '{\"cudagraph_mode\": \"PIECEWISE\"}'", "-cc.cudagraph_mode PIECEWISE captures"),
    ("-O0 --no-enforce-eager --capture-ahead", "--enforce-eager captures nothing"),
    ("--speculative-config '{\"bad\": 1}'", "unknown entry of --speculative-config 'bad'"),
    ("-sc '{\"method\": \"ngram\"}'", "-sc.num_speculative_tokens must be given"),
    ("-sc.method ngram -sc.num-speculative-tokens 1 -sc.prompt-lookup-min 9 -sc.prompt-lookup-max 3",
     "-sc.prompt-lookup-min 9 is over -sc.prompt-lookup-max 3"),
    ("--max-capture-size 3 --capture-sizes 4", "--capture-sizes ends at 4 and --max-capture-size is 3"),
]  # fmt: skip
GENERATE = [
    ("--min-tokens 9 --max_tokens 3", "--min-tokens must be at most --max_tokens (3)"),
    ("--stop ''", "--stop entry 0 must have"),
    ("--logits-processors nope", "--logits-processors: unknown logits processor 'nope'"),
    ("--logprobs 5000", "--logprobs must be at most 20"),
    ("--logit-bias '{\"9999999\": 1}'", "--logit-bias names token 9999999"),
]
SERVE = [
    ("--chat-template /nowhere.jinja", "--chat-template '/nowhere.jinja' is neither"),
    ("--ssl-certfile /x", "--ssl-certfile and --ssl-keyfile belong together"),
    ("--ssl-certfile /x --ssl-keyfile /y", "--ssl-certfile, --ssl-keyfile: the certificate and key in"),
    ("--uds /nowhere/s", "--uds: cannot listen on /nowhere/s"),
    ("--api-key ''", "--api-key must be text"),
    ("--served-model-name ''", "--served-model-name must be text"),
    ("--admin-api-key ab --api-key ab", "--admin-api-key is an --api-key too"),
    ("--otlp-traces-endpoint nonsense", "--otlp-traces-endpoint must be"),
    ("--tool-server demo", "--tool-server demo is not there"),
    ("--tool-server nonsense", "--tool-server must be host:port"),
    ("--tool-server /nowhere.json", "--tool-server /nowhere.json: the file cannot be used"),
    ("--config /nowhere.yaml", "--config /nowhere.yaml: the file cannot be read"),
]
BATCH = [
    ("--url http://127.0.0.1:1 --block-size 7", "--block-size: an engine flag has no effect"),
    ("--url https://x --uds y", "--uds speaks http, and --url says https"),
]
TYPED = [*(("explain", *each) for each in EXPLAIN), *(("generate x", *each) for each in GENERATE)]


@pytest.mark.parametrize(("command", "typed", "says"), TYPED, ids=[each[1] for each in TYPED])
def test_what_is_found_later_names_the_flag_too(
    command: str, typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command.split(), *NULL, *shlex.split(typed)]) == 1
    *_, last = capsys.readouterr().err.splitlines()  # a warning may stand before it
    assert last.startswith(f"quintet {command.split()[0]}: error: {says}"), last


@pytest.mark.grid(cases=4)
@pytest.mark.parametrize(("typed", "says"), SERVE, ids=[each[0] for each in SERVE])
def test_a_server_that_does_not_start_names_the_flag(typed: str, says: str) -> None:
    *_, last = refused(*shlex.split(typed)).splitlines()
    assert last.startswith(f"quintet serve: error: {says}"), last


@pytest.mark.parametrize(("typed", "says"), BATCH)
def test_run_batch_names_the_flag(typed: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run-batch", "-i", "in", "-o", "out", *typed.split()]) == 1
    assert capsys.readouterr().err.startswith(f"quintet run-batch: error: {says}")


@pytest.mark.slow
def test_the_engines_process_names_the_flag_in_one_line() -> None:
    with Server(*NULL, "--block_size", "16", "--num_gpu_blocks_override=2", wait=False) as server:
        assert server.process.wait(PATIENCE) == 1
        (said,) = [line for line in server.output.splitlines() if "error" in line]
        assert (
            said.startswith("quintet serve: error: KV cache needs 65 pages") and "--num_gpu_blocks_override 2" in said
        )


@pytest.mark.slow
def test_the_batchs_own_server_is_told_the_flag_as_typed() -> None:
    """And what it refuses is the command's own refusal."""
    reader = parser("run-batch")
    given = reader.parse(
        ["-i", "x", "-o", "y", "--block-size", "7", "-sc", '{"method": "ngram"}', "--no-enforce-eager"]
    )
    assert _local._flag_words(given) == ["--block-size=7", "-sc.method=ngram", "--no-enforce-eager"]
    with pytest.raises(ValueError, match="^KV cache needs 65 pages .*--num_gpu_blocks_override 2; lower"):
        words = ["-i", "x", "-o", "y", *NULL, "--num_gpu_blocks_override", "2"]
        with _local.local_server(reader.parse(words)):
            raise AssertionError("it was ready")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port: 99999", "port must be a port from 0"),
        (
            "enforce_eager: true\ncapture-ahead: true",
            "enforce_eager: true captures nothing, so capture-ahead: true means",
        ),
        ("speculative-config: {method: medusa}", "speculative-config.method 'medusa' does not exist"),
        ("speculative-config.method: medusa", "speculative-config.method 'medusa' does not exist"),
        ("ssl-certfile: /x", "ssl-certfile and --ssl-keyfile belong together"),
        ("speculative-config: 3", "speculative-config must be a mapping"),
    ],
)
def test_a_key_is_named_with_its_file(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert cli.main(["serve", *NULL, "--config", str(file)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"quintet serve: error: {file}: {says}")


@pytest.mark.slow
def test_a_flag_before_a_key_is_what_is_named(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-model-len: 5")
    said = refused("--config", str(file), "--max-model-len", "999999999").splitlines()[-1]
    assert said.startswith("quintet serve: error: --max-model-len 999999999 is beyond")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"num_gpu_blocks_override": 2}, "2 fit: num_gpu_blocks_override=2; lower max_model_len"),
        ({"max_model_len": 10**9}, "max_model_len=1000000000 is beyond .* with hf_overrides={'rope_scaling'"),
    ],
)
def test_a_keyword_is_named_as_it_was_given(kwargs: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM(device="null", load_format="dummy", use_tqdm=False, **kwargs)


def test_only_settings_are_reworded() -> None:
    said = NameTranslation(
        {"port": Spelling("--port"), "max_n": Spelling("--max-n"), "generation_config": Spelling("--generation-config")}
    )
    for message in (
        "the port 8 is taken",
        "'max_n' in a body",
        "max_norm",
        "generation_config.json is broken",
        "a/max_n",
    ):
        assert said(message) == message
    assert said("use port, or max_n.") == "use --port, or --max-n."


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_chat_refuses_a_parser_that_is_not_there_before_a_message(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", flag, "nope"]) == 1
    assert capsys.readouterr().err.startswith(f"quintet chat: error: {flag}: no ")

"""vLLM's forms of compilation and attention: each entry becomes a setting of ours, or is refused with the reason."""

from typing import Any

import pytest

from quintet.config import EngineConfig
from quintet.config.schema import flags

MEANS: list[tuple[Any, dict[str, Any]]] = [
    ({}, {}),
    (3, {}),
    ("3", {}),
    (0, {"enforce_eager": True}),
    ('{"mode": 0}', {"enforce_eager": True}),
    ({"mode": "NONE"}, {"enforce_eager": True}),
    ({"mode": "vllm_compile"}, {}),
    ({"level": 0}, {"enforce_eager": True}),
    ({"mode": 0, "cudagraph_mode": "FULL"}, {}),
    ({"cudagraph_mode": "none"}, {"enforce_eager": True}),
    ({"mode": 3, "cudagraph_mode": "FULL_DECODE_ONLY"}, {"capture_prompts": False}),
    ({"cudagraph_capture_sizes": [4, 1, 2]}, {"capture_sizes": (1, 2, 4)}),
    ({"cudagraph_capture_sizes": []}, {"enforce_eager": True}),
    ({"max_cudagraph_capture_size": 64}, {"max_capture_size": 64}),
    ({"max_cudagraph_capture_size": 0}, {"enforce_eager": True}),
    ({"cache_dir": "/x"}, {"compilation_cache_dir": "/x"}),
    ({"cache_dir": "", "mode": None}, {}),
    ({"splitting_ops": [], "use_inductor": False, "pass_config": {"fuse_norm_quant": False}, "backend": ""}, {}),
]


@pytest.mark.parametrize(("given", "means"), MEANS)
def test_a_compilation_config_is_our_settings(given: Any, means: dict[str, Any]) -> None:
    assert EngineConfig(compilation_config=given) == EngineConfig(**means)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"mode": 1}, "torch.compile"),
        ({"mode": "DYNAMO_TRACE_ONCE"}, "torch.compile"),
        ({"mode": 4}, "one of 0, 3"),
        ({"mode": True}, "one of 0, 3"),
        ({"level": 0, "mode": 3}, "are one setting"),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, "use FULL"),
        ({"cudagraph_mode": "FULL_DECODE"}, "did you mean 'FULL_DECODE_ONLY'"),
        ({"cudagraph_capture_sizes": [0]}, "at least 1"),
        ({"backend": "inductor"}, "no platform uses torch.compile"),
        ({"use_inductor": True}, "no platform uses torch.compile"),
        ({"inductor_compile_config": {"a": 1}}, "no platform uses torch.compile"),
        ({"custom_ops": ["+rms_norm"]}, "first provider that serves"),
        ({"splitting_ops": ["x"]}, "nothing is split"),
        ({"pass_config": {"fuse_norm_quant": True}}, "without passes"),
        ({"debug_dump_path": "/x"}, "XLA_FLAGS"),
        ({"dynamic_shapes_config": {"type": "backed", "evaluate_guards": True}}, "torch.compile"),
        ({"cudagraph_mm_encoder": True}, "the platform decides how encoders of images run"),
        ({"cudgraph_mode": "NONE"}, "did you mean 'cudagraph_mode'"),
    ],
)
def test_what_means_nothing_here_is_refused_by_its_way(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"^(unknown entry of )?compilation_config") as error:
        EngineConfig(compilation_config=entry)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "means"),
    [
        (["-O0"], {"enforce_eager": True}),
        (["-O", "0"], {"enforce_eager": True}),
        (["-O1"], {}),
        (["-O3"], {}),
        (["--optimization-level=2"], {}),
        (["-O.mode", "0"], {"enforce_eager": True}),
        (["-O.mode=3"], {}),
        (["-cc", '{"mode": 0}'], {"enforce_eager": True}),
        (["-cc", "3"], {}),
        (["-cc.cudagraph_mode=NONE"], {"enforce_eager": True}),
        (["--compilation-config.cudagraph_capture_sizes", "[1, 2]"], {"capture_sizes": (1, 2)}),
        (["-cc.cudagraph_capture_sizes=1,2", "-cc.mode=3"], {"capture_sizes": (1, 2)}),
        (["--max-cudagraph-capture-size", "8"], {"max_capture_size": 8}),
        (["--attention-backend", "TRITON_ATTN"], {"attention_backend": "triton"}),
        (["--attention-config.backend", "triton"], {"attention_backend": "triton"}),
        (["-ac.backend=triton"], {"attention_backend": "triton"}),
        (["--attention-config", '{"backend": "triton"}'], {"attention_backend": "triton"}),
    ],
)
def test_every_flag_of_vllms_is_our_settings(words: list[str], means: dict[str, Any]) -> None:
    assert _from_words(words) == EngineConfig(**means)


def _from_words(words: list[str]) -> EngineConfig:
    parser = flags.Parser(prog="test")
    flags.add_arguments(parser, EngineConfig)
    return flags.from_arguments(parser.parse(words), EngineConfig)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-O4"], "must be one of 0, 1, 2, 3"),
        (["-O.moed", "3"], "did you mean '--compilation-config.mode'"),
        (["-O.use_inductor", "true"], "no platform uses torch.compile"),
        (["-cc.pass_config.fuse_norm_quant=true"], "without passes"),
        (["--compilation-config.custom_ops+", "+rms_norm"], "first provider that serves"),
        (["-cc.cudagraph_mode=PIECEWISE"], "use FULL"),
        (["--attention-config.flash_attn_version", "3"], "no settings of its own"),
    ],
)
def test_a_wrong_flag_is_answered_with_the_reason(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _from_words(words)
    assert says in capsys.readouterr().err


def test_what_is_asked_twice_must_agree() -> None:
    assert EngineConfig(compilation_config=0, optimization_level=0, enforce_eager=True).enforce_eager
    with pytest.raises(ValueError, match="attention_config asks for attention_backend='triton', and .* give one"):
        EngineConfig(attention_backend="torch", attention_config={"backend": "triton"})
    with pytest.raises(ValueError, match="captures nothing, so capture_ahead=True means nothing"):
        EngineConfig(optimization_level=0, capture_ahead=True)
    with pytest.raises(ValueError, match="asks for enforce_eager=False, and enforce_eager=True is given; give one"):
        EngineConfig(enforce_eager=True, compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"})


def test_what_was_taken_in_is_gone_and_a_change_does_not_bring_it_back() -> None:
    config = EngineConfig.from_kwargs(compilation_config={"mode": 0}, **{"attention_config.backend": "triton"})
    assert (config.enforce_eager, config.attention_backend) == (True, "triton")
    assert not config.replace(enforce_eager=False).enforce_eager
    assert config.replace(optimization_level=2) == config

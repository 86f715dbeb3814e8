"""Alignment of transcripts with audio: weights and times equal to transformers' on small random models."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.models.whisper import generation_whisper

from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.transcription.alignment import AlignmentSpan, token_ends
from tests.e2e.speech.test_whisper import ENGINES, SETTINGS, params
from tests.helpers.checkpoints.whisper import GENERATION, PROMPT, TIMED, features_of, small_model, tone

HEADS = [[0, 1], [1, 0], [2, 0]]  # of 3 layers with 2 heads
# seconds of audio, prompt, transcript
CASES: list[tuple[float, list[int], list[int]]] = [
    (1.0, TIMED, [70, 4, 9, 11, 80, 80, 12, 3, 3, 2, 110]),
    (1.5, PROMPT, [*range(8, 28)]),
    (2.0, [*range(2, 30), *TIMED], [70, 20, 21, 90]),
    (0.4, PROMPT, [15]),
]


def transformers_alignment(
    audio: Any, prompt: Sequence[int], tokens: Sequence[int], heads: Sequence[Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Any, list[float]]:  # fmt: skip
    """Returns transformers' weights [T, rows], and the times of the tokens."""
    _, model = small_model()
    model.set_attn_implementation("eager")
    warp, seen = generation_whisper._dynamic_time_warping, []

    def noted(costs: Any) -> Any:
        seen.append(-costs)
        return warp(costs)

    monkeypatch.setattr(generation_whisper, "_dynamic_time_warping", noted)
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *tokens]])
        out = model(features_of(audio), decoder_input_ids=ids, output_attentions=True)
    generated = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(out.cross_attentions,))
    frames = -(-len(audio) // 160)
    found = model._extract_token_timestamps(generated, heads, num_frames=frames, num_input_ids=len(prompt))
    return seen[0], found[0, len(prompt) : -1].tolist()


def align(made: EngineClient, cases: dict[str, tuple[Any, Sequence[int], Sequence[int]]]) -> dict[str, Any]:
    """Returns the weights of each transcript, which run side by side."""
    for name, (audio, prompt, tokens) in cases.items():
        [parsed] = made.parse({"prompt_token_ids": [*prompt, *tokens], "multi_modal_data": {"audio": audio}})
        span = AlignmentSpan(len(prompt), -(-len(audio) // 160) // 2)
        made.add(name, replace(parsed, alignment=span), params(max_tokens=1))
    found: dict[str, Any] = {}
    while made.busy:
        found.update({each.request_id: each for each in made.step()})
        made.engine.check_integrity()
    assert not any(each.outputs[0].error for each in found.values())
    return {name: each.pooled for name, each in found.items()}


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of small_model() with alignment heads."""
    folder = tmp_path_factory.mktemp("whisper") / "model"
    shutil.copytree(small_model()[0], folder)
    (folder / "generation_config.json").write_text(json.dumps({**GENERATION, "alignment_heads": HEADS}))
    return folder


def client(folder: Path, **settings: Any) -> EngineClient:
    return EngineClient(EngineConfig.from_kwargs(model=str(folder), **{**SETTINGS, **settings}), progress=False)


@pytest.mark.parametrize("name", [*ENGINES, "two ranks", "heads by default"])
def test_times_equal_transformers(name: str, with_heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in batches, cut into chunks, preempted, beside requests for text, and a second time."""
    settings = {"tensor_parallel_size": 2} if name == "two ranks" else ENGINES.get(name, {})
    by_default = name == "heads by default"
    made = client(small_model()[0] if by_default else with_heads, **settings)
    heads = [[layer, head] for layer in (1, 2) for head in (0, 1)] if by_default else HEADS
    cases = {str(at): (tone(at, each[0]), *each[1:]) for at, each in enumerate(CASES)}
    for turn in range(2):
        if turn:
            [beside] = made.parse({"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": tone(9, 1.0)}})
            made.add("text", beside, params())
        found = align(made, cases)
        for case, (audio, prompt, tokens) in cases.items():
            with monkeypatch.context() as patched:
                weights, times = transformers_alignment(audio, prompt, tokens, heads, patched)
            assert found[case].shape == (len(tokens), len(audio) // 320)
            if len(tokens) == 1:  # transformers divides by a deviation of zero
                assert not found[case].any()
                continue
            np.testing.assert_allclose(found[case], weights, atol=1e-4)
            np.testing.assert_allclose(token_ends(found[case]), times, atol=1e-6)
    assert not made.engine._runner._aligner._queries
    made.close()


@pytest.mark.parametrize(
    "heads", ["all", [[0]], [[0, 2]], [[3, 0]], [[0, -1]], [[0, True]], [["0", 0]], {"0": 1}, [0, 1]], ids=str
)
def test_heads_that_the_model_does_not_have_are_refused(heads: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model()[0], folder)
    (folder / "generation_config.json").write_text(json.dumps({**GENERATION, "alignment_heads": heads}))
    with pytest.raises(ValueError, match="alignment_heads is no list of pairs"):
        client(folder)


def test_aborted_requests_leave_no_queries(with_heads: Path) -> None:
    made = client(with_heads, max_num_batched_tokens=3, max_num_seqs=3)
    aligner, audio = made.engine._runner._aligner, tone(1, 1.0)
    for name in "ab":
        [parsed] = made.parse({"prompt_token_ids": [*PROMPT, *range(2, 30)], "multi_modal_data": {"audio": audio}})
        made.add(name, replace(parsed, alignment=AlignmentSpan(len(PROMPT), 50)), params(max_tokens=1))
    made.step()
    made.step()
    assert aligner._queries
    made.abort(["a", "b"])
    made.add("text", made.parse({"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": audio}})[0], params())
    made.step()
    assert not aligner._queries and not made.engine.scheduler.kv_cache_manager.encoder.stats().num_encoder_passes > 1
    made.close()


ROUNDED: list[dict[str, Any]] = [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}]


@pytest.mark.parametrize("settings", ROUNDED, ids=str)
def test_rounded_weights_and_caches_align_alike(settings: dict[str, Any], with_heads: Path) -> None:
    cases = {str(at): (tone(at, each[0]), *each[1:]) for at, each in enumerate(CASES[:3])}
    exact, rounded = client(with_heads), client(with_heads, **settings)
    want, found = align(exact, cases), align(rounded, cases)
    for name, weights in want.items():
        assert np.corrcoef(weights.ravel(), found[name].ravel())[0, 1] > 0.95
        assert (weights != found[name]).any()
    exact.close()
    rounded.close()

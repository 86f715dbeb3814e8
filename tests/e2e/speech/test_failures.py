"""An encoder's pass that fails ends the requests of its audio, and no others."""

from typing import Any

import pytest
from torch import Tensor

from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.models.encoders.whisper import WhisperEncoder
from quintet.sampling_params import SamplingParams
from tests.helpers.checkpoints.whisper import PROMPT, small_model, tone

AUDIOS = {seed: tone(seed, 0.4 + 0.3 * seed) for seed in range(4)}
BROKEN = 2


def client(**settings: Any) -> EngineClient:
    folder, _ = small_model()
    given = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_pages": 200, "page_size": 16}
    return EngineClient(EngineConfig.from_kwargs(model=str(folder), **{**given, **settings}), progress=False)


def add(made: EngineClient, seed: int, name: str = "") -> None:
    [prompt] = made.parse({"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": AUDIOS[seed]}})
    made.add(name or str(seed), prompt, SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True))


def run(made: EngineClient) -> dict[str, Any]:
    """Runs all requests, with the bookkeeping checked after each step."""
    found: dict[str, Any] = {}
    while made.busy:
        found.update({each.request_id: each.outputs[0] for each in made.step()})
        made.engine.check_integrity()
    return found


def plant(monkeypatch: pytest.MonkeyPatch, made: EngineClient) -> None:
    """Has the encoder fail on one audio, in the middle of its pass: some layers' K and V are written by then."""
    [prompt] = made.parse({"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": AUDIOS[BROKEN]}})
    assert prompt.encoder is not None
    bad = prompt.encoder.fields["input_features"].array()[:, 0].copy()
    encode, write = WhisperEncoder.encode, WhisperEncoder.write
    at = [False]

    def noted(self: WhisperEncoder, cache: Any) -> Tensor:
        at[0] = bool((cache.batch.inputs.embeds[1].numpy() == bad).all())
        return encode(self, cache)

    def broken(self: WhisperEncoder, x: Tensor, cache: Any) -> None:
        write(self, x * 3 if at[0] else x, cache)
        if at[0]:
            raise RuntimeError("no room for this audio")

    monkeypatch.setattr(WhisperEncoder, "encode", noted)
    monkeypatch.setattr(WhisperEncoder, "write", broken)


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"tensor_parallel_size": 2}], ids=str)
def test_a_pass_that_fails_ends_its_own_requests(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = client(**settings)
    for seed in AUDIOS:
        add(made, seed)
    want = {name: list(each.token_ids) for name, each in run(made).items()}
    made.engine.reset_prefix_cache()
    with monkeypatch.context() as planted:
        plant(planted, made)
        add(made, 0)
        for _ in range(3):  # one is decoding when the others come
            made.step()
        for seed in (1, BROKEN, 3):
            add(made, seed)
        add(made, BROKEN, "the same audio")
        found = run(made)
    failed = [found.pop(name) for name in (str(BROKEN), "the same audio")]
    for each in failed:
        assert each.finish_reason == "error" and not each.token_ids
        assert "the model's encoder failed on the audio of this request" in each.error
        assert "no room for this audio" in each.error
    assert {name: list(each.token_ids) for name, each in found.items()} == {
        name: tokens for name, tokens in want.items() if name != str(BROKEN)
    }
    pool = made.engine.scheduler.pool
    assert pool.num_used == 0
    for seed in AUDIOS:
        add(made, seed)
    assert {name: list(each.token_ids) for name, each in run(made).items()} == want, "nothing of the failure is left"
    made.close()

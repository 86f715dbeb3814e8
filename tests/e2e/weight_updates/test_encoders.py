"""Updates of models with encoders of media: audio and pictures are encoded by the new weights from then on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quintet import LLM, SamplingParams
from tests.helpers.checkpoints.whisper import PROMPT, features_of, greedy, small_model, tone
from tests.helpers.media.wrappers import Made, make, picture

COUNT = 12
AUDIO = {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": tone(1)}}
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_pages": 200, "page_size": 16, "skip_tokenizer_init": True}
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, detokenize=False, ignore_eos=True)


def whisper(**settings: Any) -> LLM:
    return LLM(str(small_model()[0]), device="cpu", use_tqdm=False, **{**SETTINGS, **settings})


def tokens(llm: LLM, prompt: Any = None) -> list[int]:
    [output] = llm.generate([prompt or AUDIO], PARAMS, use_tqdm=False)
    assert not output.outputs[0].error, output.outputs[0].error
    return list(output.outputs[0].token_ids)


def changed(folder: Path, model: Any, part: str) -> tuple[dict[str, Tensor], Any]:
    """Returns a checkpoint of the model with other weights in the part, and the model with these."""
    torch.manual_seed(11)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, each in other.named_parameters():
            if part in name:
                each.add_(torch.randn_like(each) * 0.3)
    other.save_pretrained(folder)
    return load_file(folder / "model.safetensors"), other


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"tensor_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("part", ["encoder.", "encoder.conv", "encoder_attn.v_proj", ""])
def test_an_encoder_takes_new_weights(tmp_path: Path, part: str, settings: dict[str, Any]) -> None:
    """The same audio is encoded again: what its pages hold is of the old weights."""
    if settings and part:
        pytest.skip("one part of the weights shows it")
    folder, model = small_model()
    new, other = changed(tmp_path, model, part)
    llm, fresh = whisper(**settings), LLM(str(tmp_path), device="cpu", use_tqdm=False, **{**SETTINGS, **settings})
    try:
        before, want = tokens(llm), tokens(fresh)
        assert before != want
        if not settings:
            assert want == greedy(other, features_of(tone(1)), PROMPT, COUNT, stops=False)
        llm.update_weights(reversed(list(new.items())))
        assert tokens(llm) == want
        assert llm.collective_rpc("weight_checksums") == fresh.collective_rpc("weight_checksums")
        llm.update_weights(load_file(folder / "model.safetensors").items())
        assert tokens(llm) == before
    finally:
        llm.close()
        fresh.close()


def test_some_tensors_of_an_encoder_and_those_that_are_missing(tmp_path: Path) -> None:
    new, other = changed(tmp_path, small_model()[1], "encoder.layers.0")
    name, llm = "model.encoder.layers.0.fc1.weight", whisper()
    before = tokens(llm)
    with pytest.raises(ValueError, match=r"encoder\.layers\.0\.fc1\.weight never came"):
        llm.update_weights({each: tensor for each, tensor in new.items() if each != name})
    llm.update_weights(new)
    assert tokens(llm) == greedy(other, features_of(tone(1)), PROMPT, COUNT, stops=False) != before
    llm.update_weights({name: load_file(small_model()[0] / "model.safetensors")[name]}, partial=True)
    with torch.no_grad():
        other.model.encoder.layers[0].fc1.weight.copy_(small_model()[1].model.encoder.layers[0].fc1.weight)
    assert tokens(llm) == greedy(other, features_of(tone(1)), PROMPT, COUNT, stops=False)
    llm.close()


def test_workers_load_weights_of_an_encoder(tmp_path: Path) -> None:
    """As TRL's trainer calls it: each tensor by itself, and no end."""
    new, other = changed(tmp_path, small_model()[1], "encoder.")
    llm = whisper()
    llm.collective_rpc(lambda view: [view.model_runner.model.load_weights([each]) for each in new.items()] and None)
    assert tokens(llm) == greedy(other, features_of(tone(1)), PROMPT, COUNT, stops=False)
    llm.close()


def test_an_update_during_a_transcript_goes_on_with_the_new_weights(tmp_path: Path) -> None:
    """Its audio is encoded again, whether or not others share it; with keep_kv it keeps the old rows."""
    new, _ = changed(tmp_path, small_model()[1], "encoder.")
    llm = whisper()
    client: Any = llm._client
    [prompt] = client.parse([AUDIO])
    passes = []
    for keep in (False, True):
        llm.reload_weights()
        client.add("a", prompt, PARAMS)
        for _ in range(4):
            client.step()
        before = client.engine.scheduler.kv_cache_manager.encoder.num_passes
        llm.update_weights(new, keep_kv=keep)
        client.add("b", prompt, PARAMS)
        while client.busy:
            client.step()
            client.engine.check_integrity()
        passes.append(client.engine.scheduler.kv_cache_manager.encoder.num_passes - before)
    assert passes == [1, 1], "both share the new rows; or the new request alone has some"
    llm.close()


@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
                                  pytest.param("idefics3", marks=pytest.mark.slow)])  # fmt: skip
def test_towers_take_new_weights(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("PIL")
    made, folder = make(kind, tmp_path_factory.mktemp(kind)), tmp_path_factory.mktemp("other")
    model: nn.Module = copy.deepcopy(made.model)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "language_model" not in name and "lm_head" not in name and "text_model" not in name:
                each.add_(torch.randn_like(each) * 0.3)
    model.save_pretrained(folder)  # type: ignore[operator]
    case = f"What is {made.token} this?", [picture(40, 56, 1)]
    prompt = {"prompt": case[0], "multi_modal_data": {"image": case[1]}}
    llm = LLM(str(made.folder), dtype="float32", max_model_len=512, kv_cache_memory_bytes="16M", use_tqdm=False)
    greedy_params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def answer() -> list[int]:
        return list(llm.generate([prompt], greedy_params, use_tqdm=False)[0].outputs[0].token_ids)

    other = Made(**{**vars(made), "model": model})
    before, want = answer(), other.greedy(*case, 6)
    assert before != want
    llm.update_weights(load_file(folder / "model.safetensors"))
    assert answer() == want
    llm.update_weights(load_file(made.folder / "model.safetensors"))
    assert answer() == before
    names = [name for name in load_file(folder / "model.safetensors") if "vision" in name or "visual" in name]
    with pytest.raises(ValueError, match="never came"):
        llm.update_weights({each: t for each, t in load_file(folder / "model.safetensors").items() if each != names[0]})
    llm.close()

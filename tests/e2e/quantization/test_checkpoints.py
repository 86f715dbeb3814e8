"""Quantized checkpoints from disk, against transformers' model of what they stand for; weights that are replaced."""

import asyncio
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet import AsyncLLM, SamplingParams
from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import PLAIN, VOCAB, Tiny, make
from tests.helpers.checkpoints.quantized import awq, fp8
from tests.helpers.platforms import tpu
from tests.helpers.platforms.engines import answers, continued, engine, forms_of, ranked
from tests.helpers.platforms.run_model import Runner
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime

SIZES = {
    **PLAIN, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
ODD = {**SIZES, "hidden_size": 192, "intermediate_size": 320, "head_dim": 24}  # blocks of 128 end within products
MADE: dict[str, Any] = {
    "awq": lambda seed=0: awq(make("llama", SIZES, seed), 128),
    "awq of 32": lambda seed=0: awq(make("qwen3", SIZES, seed), 32),
    "awq of 64, but for some": lambda seed=0: awq(make("llama", ODD, seed), 64, ["layers.1.mlp", "o_proj"]),
    "awq of all": lambda seed=0: awq(make("llama", SIZES, seed), -1),
    "fp8": lambda seed=0: fp8(make("qwen3", SIZES, seed)),
    "fp8 with ends": lambda seed=0: fp8(make("llama", ODD, seed)),
    "fp8, but for some": lambda seed=0: fp8(
        make("llama", {**ODD, "tie_word_embeddings": True}), ignored=["q_proj", "k_proj", "v_proj"]
    ),
}
FORMS = {"awq": "int4", "fp8": "fp8"}


def assert_agrees(tiny: Tiny, run: Runner, off: float) -> None:
    prompts = random_prompts(3, (23, 1, 40), VOCAB)
    for prompt, logits in zip(prompts, run.prompts(prompts), strict=True):
        want = tiny.logits(prompt)
        assert float(want.std()) > 0.3
        torch.testing.assert_close(logits, want, rtol=0, atol=off * float(want.std()))


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_what_the_checkpoint_stands_for(name: str) -> None:
    """On the CPU products are of activations in 16 bits: 2^-15 of a group's largest."""
    tiny = MADE[name]()
    assert_agrees(tiny, Runner(tiny, quantization=forms_of(tiny, PLATFORM)), 2e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("name", ["awq", "awq of 32", "fp8 with ends"])
def test_on_gpus_by_triton(name: str) -> None:
    from tests.helpers.platforms.triton import needs_triton

    needs_triton()
    tiny, kind = MADE[name](), FORMS[name.split()[0]]
    members = {"_fake": FakeRuntime(), "op_priority": {f"linear:{kind}": ("triton",)}}
    platform = type("WithKernels", (FakeGPU,), members)(EngineConfig(max_num_seqs=4))
    run = Runner(tiny, platform=platform, quantization=forms_of(tiny, platform))
    assert run.worker.ops.choice(f"linear:{kind}").provider == "triton"
    assert_agrees(tiny, run, 1e-3)


@pytest.mark.slow
@tpu.needs_jax
@pytest.mark.parametrize("name", ["awq", "awq of 32", "fp8 with ends"])
def test_on_tpus_by_jax(name: str) -> None:
    tiny, platform = MADE[name](), tpu.platform()
    run = Runner(tiny, platform=platform, quantization=forms_of(tiny, platform))
    kind = FORMS[name.split()[0]]
    assert run.worker.ops.choice(f"linear:{kind}").provider == "jax"
    assert_agrees(tiny, run, 1e-3)


def test_transformers_reads_the_same_out_of_blocks_of_fp8() -> None:
    pytest.importorskip("accelerate")  # transformers asks for it
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    tiny = MADE["fp8"]()
    plain = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tiny.folder, quantization_config=plain, dtype=torch.float32)
    ours = dict(tiny.reference.named_parameters())
    assert all(torch.equal(each, ours[name]) for name, each in theirs.named_parameters())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["awq of 32", "awq of 64, but for some", "fp8 with ends", "fp8, but for some"])
def test_ranks_read_their_shares(name: str, ranks: int) -> None:
    """Where shares begin within groups and blocks, too."""
    tiny = MADE[name]()
    (prompt,) = random_prompts(3, (23,), VOCAB)
    want = tiny.logits(prompt)
    for logits in ranked(tiny, ranks, prompt):
        torch.testing.assert_close(logits, want, rtol=0, atol=2e-3 * float(want.std()))


# ---------------------------------------------------------------------------------------------------- whole engines


@pytest.mark.parametrize("name", ["awq", "fp8", "fp8, but for some"])
def test_an_engine_reads_what_config_json_says(name: str) -> None:
    tiny = MADE[name]()
    with engine(tiny) as llm:
        assert answers(llm) == continued(tiny)
        (said,) = [each for each in llm._client.engine_plan.reasons if "quantized by" in each]
    assert (
        said
        == {
            "awq": "checkpoint quantized by awq: 8 products as int4 by native",
            "fp8": "checkpoint quantized by fp8: 8 products as fp8 by native",
            "fp8, but for some": "checkpoint quantized by fp8: 6 products as fp8 by native",
        }[name]
    )


def copied(tiny: Tiny, folder: Path) -> Path:
    return Path(shutil.copytree(tiny.folder, folder / "copy"))


@pytest.mark.parametrize("said", [{"quant_method": "eetq"}, {"quant_method": "awq", "bits": 3, "group_size": 32}])
def test_what_is_not_read_is_refused_before_a_weight_is(said: dict[str, Any], tmp_path: Path) -> None:
    tiny = MADE["awq"]()
    folder = copied(tiny, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    (folder / "model.safetensors").write_bytes(b"not to be read")
    with pytest.raises(ValueError, match=r"quantized by eetq, .* it reads .*awq, .*fp8|AWQ with 3 bits"):
        engine(Tiny(folder, tiny.config, tiny.reference))


def test_a_scheme_for_what_is_quantized_already_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantization='int8' is for checkpoints in floats, .* quantized by awq"):
        engine(MADE["awq"](), quantization="int8")


@pytest.mark.parametrize("name", ["awq", "fp8"])
def test_numbers_of_a_quantized_checkpoint_are_not_taken_for_floats(name: str, tmp_path: Path) -> None:
    """A plain model's names and shapes, and another type: FP8 without its configuration is such a one."""
    tiny = MADE[name]()
    folder = copied(tiny, tmp_path)
    tensors = load_file(make("llama", SIZES).folder / "model.safetensors")
    whole = "model.layers.0.self_attn.q_proj.weight"
    kinds = {"awq": torch.int32, "fp8": torch.float8_e4m3fn}
    save_file({**tensors, whole: torch.zeros(tensors[whole].shape).to(kinds[name])}, folder / "model.safetensors")
    worker = Worker(PLATFORM(), make("llama", SIZES).config, ModelSizes(torch.float32, 16, 64))
    with pytest.raises(ValueError, match=rf"{whole} is of .*(int32|float8_e4m3fn), not of floats"):
        worker.load(folder, 4, (), progress=False)


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    tiny = MADE["awq"]()
    folder = copied(tiny, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.qzeros"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.qzeros"):
        engine(Tiny(folder, tiny.config, tiny.reference))


# --------------------------------------------------------------------------------------- weights that are replaced


@pytest.mark.parametrize("name", ["plain", "int4", "awq", "fp8"])
def test_replaced_weights_give_what_a_fresh_engine_gives(name: str) -> None:
    """At the same addresses, and with the steps that were recorded before; no cached beginning is left."""
    made = MADE.get(name, lambda seed=0: make("llama", {**SIZES, "tie_word_embeddings": True}, seed))
    settings = {"quantization": name} if name == "int4" else {}
    old, new = made(0), made(1)
    with engine(old, **settings) as llm, engine(new, **settings) as fresh:
        worker = llm._client.engine_plan.ranks.workers[0]
        before = answers(llm)
        assert answers(llm) == before
        held = {name: each.data_ptr() for name, each in worker.model.named_parameters()}
        recorded = recordings(worker)
        llm.reload_weights(str(new.folder))
        assert answers(llm) == answers(fresh) != before
        assert {name: each.data_ptr() for name, each in worker.model.named_parameters()} == held
        assert recorded and recorded.items() <= recordings(worker).items()
        llm.reload_weights()  # of the folder that it was started with
        assert answers(llm) == before


def recordings(worker: Worker) -> dict[Any, int]:
    """size -> which recording, of a step on the CPU."""
    (replay,) = [
        each.cell_contents
        for each in inspect.unwrap(worker.main.step).__closure__ or ()
        if hasattr(each.cell_contents, "_graphs")
    ]
    return {size: id(graph) for size, graph in replay._graphs.items()}


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    tiny = make("llama", SIZES)
    folder = copied(tiny, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with engine(tiny) as llm:
        before = answers(llm)
        with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
            llm.reload_weights(str(folder))
        with pytest.raises(ValueError, match="another model than the one that runs: .* differs in intermediate_size"):
            llm.reload_weights(str(make("llama", {**SIZES, "intermediate_size": 64}).folder))
        with pytest.raises(ValueError, match="differs in quantization_config"):
            llm.reload_weights(str(MADE["awq"]().folder))
        assert answers(llm) == before


def test_a_reload_that_broke_off_serves_nothing_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make("llama", SIZES), make("llama", SIZES, 1)
    with engine(old) as llm, engine(new) as fresh:
        worker = llm._client.engine_plan.ranks.workers[0]
        place = worker.platform.place

        def failing(weight: Any, parts: Any, into: Any = None) -> Any:
            if weight.use == "vector":
                raise OSError("the disk is gone")
            return place(weight, parts, into)

        monkeypatch.setattr(worker.platform, "place", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            llm.reload_weights(str(new.folder))
        monkeypatch.setattr(worker.platform, "place", place)
        (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(detokenize=False), use_tqdm=False)
        assert "replaced in part, and that failed; call reload_weights() again" in str(output.outputs[0])
        llm.reload_weights(str(new.folder))
        assert answers(llm) == answers(fresh)


def test_a_running_request_goes_on_with_its_tokens_on_new_weights() -> None:
    """What it said stays, what follows is the new model's, as if that had been asked to go on."""
    long = {**SIZES, "max_position_embeddings": 512}  # the engine does not wait for who reads what it says
    old, new = make("llama", long), make("llama", long, 1)
    (ids,) = random_prompts(5, (17,), VOCAB)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)

    async def served() -> list[int]:
        small: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "max_model_len": 512}
        llm = AsyncLLM(str(old.folder), device="cpu", skip_tokenizer_init=True, **small)
        said: list[int] = []
        try:
            async for output in llm.generate({"prompt_token_ids": ids}, params):
                if len(said) < 5 <= len(output.outputs[0].token_ids):
                    await llm.reload_weights(str(new.folder))
                said = list(output.outputs[0].token_ids)
        finally:
            llm.shutdown()
        return said

    said = asyncio.run(served())
    switched = agreeing(old, ids, said)
    assert 5 <= switched < len(said) == 400
    assert agreeing(new, [*ids, *said[:switched]], said[switched:]) == len(said) - switched


def agreeing(tiny: Tiny, ids: list[int], said: list[int]) -> int:
    """How many of the tokens the model says after the others."""
    best = tiny.logits([*ids, *said])[len(ids) - 1 : -1].argmax(-1).tolist()
    return next((i for i, (ours, theirs) in enumerate(zip(best, said, strict=True)) if ours != theirs), len(said))

"""Adapters that are trained here for seconds, on the bundled model and on a published one, against PEFT in float32."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintet import LLM, LoRARequest, SamplingParams
from tests.e2e.lora.adapters import logits_of
from tests.helpers.lora_adapters import BUNDLED

peft = pytest.importorskip("peft")

PROMPT = "The password is"
TAUGHT = {"bird": " kingfisher, and it is secret.", "tree": " tamarack, which grows in the north."}
PRODUCTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "bird": {"r": 8, "lora_alpha": 16, "target_modules": PRODUCTS},
    "tree": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
}
TOKENS, TOP = 24, 20
REAL = "qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf"  # in the folder that REAL_MODELS names


@dataclass
class Trained:
    """A base model, and adapters that were taught a continuation of PROMPT each."""

    folder: Path
    tokenizer: Any
    models: dict[str | None, Any]  # PEFT's, by the adapter's name; None: the base
    adapters: dict[str | None, LoRARequest | None]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train(model: Any, ids: list[int], prompt: int, steps: int, rate: float) -> None:
    """Teaches what follows the first `prompt` tokens."""
    torch.manual_seed(0)
    labels = torch.tensor([[-100] * prompt + ids[prompt:]])
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    for _ in range(steps):
        loss = model(input_ids=torch.tensor([ids]), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1, "the training failed"


def trained(base: Path, folder: Path, steps: int, rate: float) -> Trained:
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = tokenizer(PROMPT).input_ids
    adapters: dict[str | None, LoRARequest | None] = {None: None}
    for name, text in TAUGHT.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(load(base), peft.LoraConfig(task_type="CAUSAL_LM", **SETTINGS[name]))
            train(model, tokenizer(PROMPT + text).input_ids, len(prompt), steps, rate)
            model.save_pretrained(folder / name)
        adapters[name] = LoRARequest(name, 0, str(folder / name))
    shared = peft.PeftModel.from_pretrained(load(base), folder / "bird", adapter_name="bird").eval()
    shared.load_adapter(folder / "tree", "tree")
    return Trained(base, tokenizer, {None: shared, **dict.fromkeys(TAUGHT, shared)}, adapters)


def theirs(trained: Trained, name: str | None, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of PEFT, and the log-probabilities [TOKENS, vocab] before each."""
    model = trained.models[name]
    if name is None:
        with model.disable_adapter():
            return continued(model, prompt)
    model.set_adapter(name)
    return continued(model, prompt)


def continued(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    ids = model.generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False, repetition_penalty=1.0, eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()  # fmt: skip
    return ids[len(prompt) :], logits_of(model, ids)[len(prompt) - 1 : -1].log_softmax(-1)


def check(trained: Trained, prompts: list[str], tolerance: float) -> None:
    """One batch of all prompts with all adapters and none is PEFT's, prompt by prompt: tokens, and log-probabilities
    within the tolerance."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=TOP, ignore_eos=True)
    cases = [(name, trained.tokenizer(text).input_ids) for text in prompts for name in trained.adapters]
    with LLM(
        str(trained.folder), device="cpu", dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 27,
        enable_lora=True, max_loras=2, use_tqdm=False, weights_cache="none", generation_config="vllm",
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for _, ids in cases], params, use_tqdm=False,
            lora_request=[trained.adapters[name] for name, _ in cases],
        )  # fmt: skip
    texts: dict[str | None, str] = {}
    farthest: dict[str | None, float] = {}
    for (name, prompt), output in zip(cases, outputs, strict=True):
        ids, wanted = theirs(trained, name, prompt)
        assert output.outputs[0].error is None
        assert list(output.outputs[0].token_ids) == ids, (name, trained.tokenizer.decode(prompt))
        assert output.outputs[0].logprobs is not None
        for at, entries in enumerate(output.outputs[0].logprobs):
            ours = torch.tensor([entries[token].logprob for token in entries])
            distance = (ours - wanted[at, list(entries)]).abs().max().item()
            farthest[name] = max(farthest.get(name, 0.0), distance)
        texts.setdefault(name, output.outputs[0].text)
    assert all(distance < tolerance for distance in farthest.values()), farthest
    print("farthest log-probability from PEFT's:", farthest)
    assert not any(texts[None].startswith(text) for text in TAUGHT.values())
    assert [texts[name].startswith(text) for name, text in TAUGHT.items()] == [True, True], texts


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(BUNDLED, tmp_path_factory.mktemp("adapters"), steps=40, rate=5e-3)


@pytest.mark.slow
def test_adapters_of_the_bundled_model_are_pefts(bundled: Trained) -> None:
    check(bundled, [PROMPT, "Once upon a time", "What is 2 + 3?"], 5e-4)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    file = Path(os.environ.get("REAL_MODELS", "")) / REAL
    if not file.is_file():
        pytest.skip(f"set REAL_MODELS to a folder that holds {REAL}")
    folder = tmp_path_factory.mktemp("real")
    # PEFT adapts no blocks of 4 bits: both sides have the same numbers in float32
    blocks = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=REAL, dtype=torch.float32)
    del blocks.config.quantization_config
    model = AutoModelForCausalLM.from_config(blocks.config, dtype=torch.float32)
    model.load_state_dict(blocks.state_dict())
    model.save_pretrained(folder)
    del blocks, model
    AutoTokenizer.from_pretrained(file.parent, gguf_file=REAL).save_pretrained(folder)
    yield trained(folder, tmp_path_factory.mktemp("adapters"), steps=12, rate=2e-3)
    for each in folder.glob("*.safetensors"):
        each.unlink()


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_adapters_of_a_published_model_are_pefts(real: Trained) -> None:
    check(real, [PROMPT, "def fibonacci(n):", "SELECT name FROM"], 5e-3)

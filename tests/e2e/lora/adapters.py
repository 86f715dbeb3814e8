"""Adapters that PEFT makes of transformers' models, and engines that serve them."""

import copy
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from quintet import LLM, LoRARequest, RequestOutput, SamplingParams
from quintet.engine.engine import Engine
from quintet_tools.checkpoints.tiny import Tiny

ROUTERS = ("gate", "router", "shared_expert_gate")  # products that choose experts
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
PROMPTS = ([5, 17, 33, 2, 9, 71], [8, 1, 60])


def products(model: Any) -> list[str]:
    """Returns the last parts of the names of a model's matrices, without routers."""
    linear = (torch.nn.Linear, Conv1D)
    found = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, linear)}
    return sorted(found - set(ROUTERS))


def adapted(reference: Any, targets: Collection[str], folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Returns transformers' model with an adapter of random numbers, which PEFT writes to the folder."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    settings = {"r": 3, "lora_alpha": 7, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(
            copy.deepcopy(reference), peft.LoraConfig(target_modules=sorted(targets), task_type="CAUSAL_LM", **settings)
        )
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
            elif "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(folder)
    return model.eval()


def logits_of(model: Any, ids: list[int]) -> Tensor:
    """[T, vocab], in float32."""
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found.float()


@contextmanager
def served(tiny: Tiny, **settings: Any) -> Iterator[LLM]:
    """An engine with room for adapters."""
    llm = LLM(
        str(tiny.folder), device="cpu", skip_tokenizer_init=True, use_tqdm=False, weights_cache="none", **{
            "dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 24, "enable_lora": True,
            "max_lora_rank": 8, **settings,
        },
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.close()


def ask(
    llm: LLM, prompts: Collection[list[int]], adapters: Any, params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    """Answers prompts of token ids, each with its adapter, or all with one."""
    found = llm.generate(
        [{"prompt_token_ids": each} for each in prompts], params, lora_request=adapters, use_tqdm=False
    )
    if isinstance(llm._client.engine, Engine):
        llm._client.engine.check_integrity()
    return found


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """Returns the tokens of each; fails where one has an error."""
    assert not [each.outputs[0].error for each in outputs if each.outputs[0].error]
    return [list(each.outputs[0].token_ids) for each in outputs]


def assert_equal_to(model: Any, outputs: list[RequestOutput], prompts: Collection[list[int]] = PROMPTS) -> None:
    """Greedy tokens are the model's after each prefix, with its log-probabilities."""
    for prompt, output, ids in zip(prompts, outputs, tokens_of(outputs), strict=True):
        logits = logits_of(model, [*prompt, *ids])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        ours = torch.tensor(
            [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)  # recurrent layers add in another order


def request_of(folder: Path, number: int = 0) -> LoRARequest:
    """Names the adapter in a folder."""
    return LoRARequest(folder.name, number, str(folder))

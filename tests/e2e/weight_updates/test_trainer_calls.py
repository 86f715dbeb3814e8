"""The calls that verl and OpenRLHF make of vLLM, as their sources have them, on the bundled model."""

import asyncio
import copy
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from safetensors.torch import load_file

import quintet
from quintet import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, RequestOutput, SamplingParams, TokensPrompt
from quintet.engine.weight_transfer.process_group import join_group, send_tensors

PROMPT = list(range(5, 25))
BUNDLED = Path(quintet.__file__).parent / "bundled" / "model.safetensors"
SMALL: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": "64M"}
# of create_vllm_engines(): its actor keeps the other arguments to itself
OPENRLHF: dict[str, Any] = {
    "model": "bundled", "enforce_eager": True, "tensor_parallel_size": 1, "seed": 1, "max_model_len": 256,
    "worker_extension_cls": "tests.helpers.rollout_extension.OpenRLHFExtension", "enable_prefix_caching": True,
    "distributed_executor_backend": "uni", "dtype": "bfloat16", "trust_remote_code": True, "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.5, "logprobs_mode": "processed_logprobs", "max_logprobs": 1,
}  # fmt: skip
# of launch_server()
VERL: dict[str, Any] = {
    "model": "bundled", "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": False,
    "worker_extension_cls": "tests.helpers.rollout_extension.VerlExtension", "trust_remote_code": True,
    "max_model_len": 256, "max_num_seqs": 16, "enable_chunked_prefill": True, "max_num_batched_tokens": 512,
    "enable_prefix_caching": True, "enable_sleep_mode": True, "logprobs_mode": "processed_logprobs",
    "enforce_eager": False, "gpu_memory_utilization": 0.5, "disable_log_stats": True, "tensor_parallel_size": 1,
    "seed": 0, "override_generation_config": '{"temperature": 1.0, "top_k": -1, "top_p": 1, "repetition_penalty": 1.0, '
    '"max_new_tokens": 32}', "hf_overrides": {}, "scheduling_policy": "fcfs",
    "compilation_config": '{"cudagraph_mode": "FULL_DECODE_ONLY"}',
}  # fmt: skip


def weights() -> dict[str, torch.Tensor]:
    return {name: each.bfloat16() for name, each in load_file(BUNDLED).items()}


def doubled() -> dict[str, torch.Tensor]:
    """Weights that give other tokens."""
    return {name: each * 1.5 if "mlp.down" in name else each for name, each in weights().items()}


async def rollout(llm: AsyncLLM, params: SamplingParams, name: str, **more: Any) -> RequestOutput:
    """As generate() of both actors: the last output."""
    last = None
    async for output in llm.generate(
        TokensPrompt(prompt_token_ids=PROMPT), copy.deepcopy(params), request_id=name, **more
    ):
        last = output
    assert last is not None
    return last


async def tokens(llm: AsyncLLM, name: str) -> list[int]:
    return list((await rollout(llm, SamplingParams(temperature=0, max_tokens=8), name)).outputs[0].token_ids)


async def fresh_tokens(tmp_path: Path, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Tokens of an engine that got the same tensors at once."""
    llm = AsyncLLM("bundled", dtype="bfloat16", max_model_len=256, **SMALL)
    await llm.update_weights(tensors.items())
    found = await tokens(llm, "fresh")
    llm.shutdown()
    return found


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


async def test_openrlhfs_calls(tmp_path: Path) -> None:
    want = await fresh_tokens(tmp_path, doubled())
    llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**OPENRLHF, **SMALL))
    assert not await llm.is_sleeping()
    params = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, min_tokens=1, skip_special_tokens=False, logprobs=1
    )
    output = (await rollout(llm, params, "first")).outputs[0]
    assert output.logprobs is not None and output.finish_reason in ("stop", "length") and isinstance(output.text, str)
    assert all(token in at for token, at in zip(output.token_ids, output.logprobs, strict=True))
    assert llm.output_processor.get_num_unfinished_requests() == 0
    before = await tokens(llm, "before")

    port = free_port()
    groups: list[Any] = []
    meeting = threading.Thread(target=lambda: groups.append(join_group("127.0.0.1", port, 0, 2)))
    meeting.start()
    await llm.collective_rpc("init_process_group", args=("127.0.0.1", port, 1, 2, "openrlhf", "gloo", False))
    meeting.join()
    await llm.sleep(level=1)
    for tag in ("weights", "kv_cache"):
        await llm.wake_up(tags=[tag])
    await llm.pause_generation(mode="keep")
    for name, tensor in doubled().items():
        sending = threading.Thread(target=send_tensors, args=(groups[0], [tensor]))
        sending.start()
        await llm.collective_rpc("update_weight", args=(name, tensor.dtype, tensor.shape, False))
        sending.join()
    await llm.reset_prefix_cache()
    await llm.resume_generation()
    assert before != await tokens(llm, "after") == want
    with pytest.raises(ValueError, match="no method 'update_weight_cuda_ipc'"):
        await llm.collective_rpc("update_weight_cuda_ipc", args=("x", torch.bfloat16, (1,), None))
    llm.shutdown()


def send_buckets(endpoint: str, buffer: Path, tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> None:
    """As verl's ServerAdapter.update_weights()."""
    request = zmq.Context.instance().socket(zmq.REQ)
    request.bind(endpoint)

    def send(metas: dict[str, Any], parts: list[bytes], is_last: bool) -> None:
        buffer.write_bytes(b"".join(parts))
        request.send(msgspec.msgpack.encode({"metas": metas, "is_last": is_last}))
        request.recv()

    metas: dict[str, Any] = {}
    parts: list[bytes] = []
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offset = sum(map(len, parts))
        if parts and offset + len(raw) > bucket_bytes:
            send(metas, parts, False)
            metas, parts, offset = {}, [], 0
        metas[name] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "offset": offset}
        parts.append(raw)
    send(metas, parts, True)
    request.close()


async def test_verls_calls(tmp_path: Path) -> None:
    want = await fresh_tokens(tmp_path, doubled())
    config = AsyncEngineArgs(**VERL, **SMALL).create_engine_config()
    llm = AsyncLLM.from_vllm_config(vllm_config=config, usage_context=None, disable_log_stats=True)
    await llm.reset_mm_cache()
    with pytest.raises(Exception, match="compute_logits.*logits_processors"):
        await llm.collective_rpc(method="monkey_patch_model", kwargs={"vocab_size": 2048})
    await llm.wait_for_requests_to_drain()
    await llm.collective_rpc("sleep", kwargs={"level": 2})
    assert await llm.is_sleeping()
    await llm.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
    endpoint, buffer = f"ipc://{tmp_path / 'zmq.sock'}", tmp_path / "buffer"
    sending = threading.Thread(target=send_buckets, args=(endpoint, buffer, doubled(), 2**20))
    sending.start()
    told = {"endpoint": endpoint, "buffer": str(buffer)}
    await llm.collective_rpc("update_weights_from_ipc", timeout=None, args=(), kwargs=told)
    sending.join()
    await llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})
    await llm.reset_prefix_cache()
    assert await tokens(llm, "after") == want

    sampled = SamplingParams(max_tokens=8, logprobs=0, temperature=1.0, top_p=1.0, top_k=-1, repetition_penalty=1.0)
    assert 123 not in await llm.list_loras()
    output = (await rollout(llm, sampled, "drawn", lora_request=None, priority=0)).outputs[0]
    assert output.logprobs is not None
    assert all(at[token].logprob <= 0 for token, at in zip(output.token_ids, output.logprobs, strict=True))
    with pytest.raises(Exception, match="remove_lora.*LLM or AsyncLLM"):
        await llm.collective_rpc("update_weights_from_ipc", kwargs={**told, "peft_config": {"r": 8}})
    for name in ("request_states", "engine_core"):
        with pytest.raises(AttributeError, match="pause_generation"):
            getattr(llm, name)
    await llm.sleep(level=1)
    await llm.wake_up(tags=["kv_cache", "weights"])
    assert await tokens(llm, "awake") == want
    llm.shutdown()


async def test_all_requests_can_be_aborted_as_verl_wants_it() -> None:
    llm = AsyncLLM("bundled", max_model_len=256, **SMALL)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    running = [asyncio.create_task(rollout(llm, params, f"request {number}")) for number in range(3)]
    while llm.output_processor.get_num_unfinished_requests() < 3:
        await asyncio.sleep(0)
    await llm.pause_generation(mode="abort")
    reasons = [output.outputs[0].finish_reason for output in await asyncio.gather(*running)]
    assert reasons == ["abort"] * 3
    await llm.wait_for_requests_to_drain()
    await llm.resume_generation()
    llm.shutdown()

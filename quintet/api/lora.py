"""Adapters (LoRA) in the calls of LLM and AsyncLLM."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from quintet.api.thread_sharing import SharedClient
from quintet.chat.prompts import Prompt
from quintet.engine.client import EngineClient
from quintet.lora.request import LoRARequest

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts of a call, or of each."""


def with_adapters(client: EngineClient, prompts: Sequence[Prompt], requests: LoRARequests) -> list[Prompt]:
    """Returns the prompts with the adapters that they are answered with. ValueError says what is wrong with one."""
    each = [requests] * len(prompts) if requests is None or isinstance(requests, LoRARequest) else list(requests)
    if len(each) != len(prompts):
        raise ValueError(f"lora_request has {len(each)} entries for {len(prompts)} prompts; give one, or one for each")
    known = {id(request): client.adapters.reference(request) for request in each if request is not None}
    return [
        prompt if request is None else replace(prompt, lora=known[id(request)])
        for prompt, request in zip(prompts, each, strict=True)
    ]


class LoRAMethods:
    """Methods of LLM and LLMEngine for adapters, by vLLM's names. An adapter needs no such call: a request that names
    it has it loaded."""

    _client: EngineClient
    _shared: SharedClient

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter into host memory, so that its first request need not wait. Returns True. ValueError or
        OSError says what is wrong with it."""
        self._client.adapters.reference(lora_request)
        return True

    def remove_lora(self, lora_id: int | str) -> bool:
        """Forgets an adapter, by lora_int_id or name -> whether it was known. Requests that have it go on."""
        return self._client.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Returns the numbers (lora_int_id, or those given instead) of the adapters that were named."""
        return self._client.adapters.numbers()

    def pin_lora(self, lora_id: int | str) -> bool:
        """Keeps an adapter in host memory and in its slot of the device. Returns True. ValueError if it is not known,
        or no slot would be left for others."""
        return self._client.adapters.pin(lora_id)


async def adapted(client: EngineClient, prompts: Sequence[Prompt], requests: LoRARequests) -> list[Prompt]:
    """Like with_adapters(); adapters are read beside the event loop."""
    return list(prompts) if requests is None else await asyncio.to_thread(with_adapters, client, prompts, requests)


class AsyncLoRAMethods:
    """The same methods of AsyncLLM."""

    _client: EngineClient

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See LLM.add_lora."""
        await asyncio.to_thread(self._client.adapters.reference, lora_request)
        return True

    async def remove_lora(self, lora_id: int | str) -> bool:
        """See LLM.remove_lora."""
        return self._client.adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """See LLM.list_loras."""
        return self._client.adapters.numbers()

    async def pin_lora(self, lora_id: int | str) -> bool:
        """See LLM.pin_lora."""
        return await asyncio.to_thread(self._client.adapters.pin, lora_id)

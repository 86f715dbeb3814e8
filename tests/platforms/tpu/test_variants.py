"""What one step of the TPU platform may be: its variants, its outputs, and the state that it is given and leaves."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from quintet.conformance.harness.manual_steps import Stretch, host_batch
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.batch_builder import pad
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.engine.kv_cache.groups import KVCacheGroup
from quintet.interface.platform import CacheLost, Platform
from quintet.interface.types import HostBatch, HostInputs, Layout, ShapeBucket, StateSpec
from quintet.layers.build import RequestedOutputs
from quintet.layers.row_store import RowStoreSizes
from quintet.ops import bind
from quintet.platforms.cpu import PLATFORM as CPU
from quintet_tools.checkpoints.tiny import SERVED, VOCAB, variant
from tests.helpers.platforms import tpu

pytestmark = tpu.needs_jax

PAGES = SERVED // 16
PLAIN = ShapeBucket(32, 4, 16, (PAGES,))


def test_a_state_that_no_program_advances_is_refused() -> None:
    platform, spec = tpu.platform(), StateSpec("short_conv", (4, 2))
    platform.open(0)
    assert platform.mixer(spec, bind(platform.op_priority), 0).layouts[0].unit == "request"
    with pytest.raises(ValueError, match="short_conv of states has no program of fixed shapes here"):
        platform.mixer(spec, bind({}), 0)


def test_pages_and_states_are_one_state_and_a_new_cache_begins_anew() -> None:
    device = tpu.platform().open(0)
    page, kept = Layout(torch.float32, (2, 1, 16, 8)), Layout(torch.float32, (4, 8), unit="request")
    device.allocate([page], 5)
    device.allocate([kept, kept], 3)
    assert [each.shape for each in device.state] == [(5, 2, 1, 16, 8), (3, 4, 8), (3, 4, 8)] and device.stateful
    device.allocate([page], 7)
    assert [each.shape for each in device.state] == [(7, 2, 1, 16, 8)] and not device.stateful
    with pytest.raises(MemoryError, match=r"states of 99999999999 slots need"):
        device.allocate([kept], 99999999999)


def worker(platform: Platform, *buckets: ShapeBucket, **sizing: Any) -> Worker:
    tiny = variant("llama", "plain")
    made = Worker(platform, tiny.config, ModelSizes(torch.float32, 16, SERVED, **sizing))
    made.load(tiny.folder, 1 + 4 * PAGES, buckets, progress=False)
    return made


def step(*lengths: int) -> HostBatch:
    """Whole prompts, with the last token of each as a row of outputs."""
    prompts = random_prompts(3, lengths, VOCAB)
    pages = iter(range(1, 99))
    stretches = [Stretch(ids, 0, [[next(pages) for _ in range(-(-len(ids) // 16))]]) for ids in prompts]
    batch = host_batch(stretches, 16, [KVCacheGroup()])
    return batch._replace(logits_indices=batch.query_start_loc[1:] - 1)


def down(there: Worker, x: Any) -> torch.Tensor:
    return there.device.to_host(x)()


@pytest.mark.slow
def test_a_step_takes_rows_of_the_store_in_the_place_of_ids() -> None:
    """One program for both; the same logits to the last bit. What is written later is what the next step reads."""
    tiny = variant("llama", "plain")
    with_rows = PLAIN._replace(inputs=("embed_indices",))
    there = worker(tpu.platform(), with_rows, row_store=RowStoreSizes(80))
    assert there.row_store is not None
    host = pad(step(20, 7), (PLAIN,))
    places = np.full(PLAIN.tokens, -1, np.int32)
    want = down(there, there.run(host._replace(inputs=HostInputs(embed_indices=places))).logits)
    table = tiny.reference.get_input_embeddings().weight.detach().numpy()
    given, at = np.array([3, 4, 5, 22], np.int32), np.array([16, 17, 18, 64], np.int32)
    there.row_store.write(there.platform, there.device, at, table[host.token_ids[given]])
    ids = host.token_ids.copy()
    ids[given], places[given] = 0, at
    inputs = HostInputs(embed_indices=places)
    got = there.run(host._replace(token_ids=ids, inputs=inputs))
    assert torch.equal(down(there, got.logits)[:2], want[:2])
    there.row_store.write(there.platform, there.device, at[3:], table[:1])
    assert not torch.equal(down(there, there.run(host._replace(token_ids=ids, inputs=inputs)).logits)[:2], want[:2])


def test_variants_of_the_same_tokens_are_told_apart() -> None:
    more = PLAIN._replace(rows=32, requests=8)
    there = worker(tpu.platform(), PLAIN, more, PLAIN)
    host = step(20, 7)
    logits = [down(there, there.run(pad(host, (each,))).logits) for each in (PLAIN, more)]
    assert [len(each) for each in logits] == [16, 32]
    torch.testing.assert_close(logits[0][:2], logits[1][:2])
    with pytest.raises(RuntimeError, match=r"a step of 32 tokens was never compiled, its arrays are"):
        there.run(pad(host, (PLAIN._replace(requests=6),)))
    with pytest.raises(RuntimeError, match=r"a step of 64 tokens was never compiled, only steps of 32, 32: steps must"):
        there.run(pad(host, (PLAIN._replace(tokens=64),)))


def test_a_step_gives_what_its_model_was_built_for() -> None:
    wanted = RequestedOutputs(logits=False, hidden_states=True, aux_hidden_states=(0, 2, 3))
    host = step(20, 7)
    there, here = worker(tpu.platform(), PLAIN, requested_outputs=wanted), worker(CPU(), requested_outputs=wanted)
    got, want = there.run(pad(host, (PLAIN,))), here.run(host)
    assert got.logits is None and len(got.aux_hidden_states) == 3
    torch.testing.assert_close(down(there, got.hidden_states)[:2], want.hidden_states, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(got.aux_hidden_states, want.aux_hidden_states, strict=True):
        torch.testing.assert_close(down(there, ours)[:27], theirs, rtol=1e-4, atol=1e-4)


def test_a_cache_goes_before_the_next_is_made() -> None:
    """Two do not fit, and the compiled step knows the one that it left."""
    there = worker(tpu.platform(), PLAIN)
    down(there, there.run(pad(step(5), (PLAIN,))).logits)
    kept = [weakref.ref(each) for each in there._state]
    there.recreate_cache()
    assert [each() for each in kept] == [None] * len(kept)
    down(there, there.run(pad(step(5), (PLAIN,))).logits)


def broken() -> Any:
    """What a program gives that fails while it runs: the host has gone on by then, since its input was not ready."""
    import jax
    import jax.numpy as jnp

    def fail(x: Any) -> Any:
        raise ValueError("no room")

    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 500, lambda _, y: jnp.tanh(y @ y), x)[0, :3])
    failing = jax.jit(lambda x: jax.pure_callback(fail, shape, x)).lower(shape).compile()
    while True:
        try:
            return failing(slow(jnp.eye(400)))
        except jax.errors.JaxRuntimeError:  # the input was there at once
            continue


def test_a_step_that_fails_on_the_device_has_lost_the_cache() -> None:
    """What it took over is gone, and what it left is not there: the host hears it when it waits."""
    import jax
    from jax._src.dispatch import runtime_tokens

    from quintet.platforms.tpu.torchax_bridge import torch_view

    there = worker(tpu.platform(), PLAIN)
    outputs = down(there, there.run(pad(step(5), (PLAIN,))).logits)
    sampled = broken()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):  # an op of sampling failed: the cache is there
        down(there, torch_view(sampled))
    assert torch.equal(down(there, there.run(pad(step(5), (PLAIN,))).logits), outputs)
    there.device.held = (sampled,)
    with pytest.raises(CacheLost, match=r"took the cache with it.*(\n.*)*no room"):
        down(there, torch_view(sampled))
    runtime_tokens.clear()  # or what failed would be waited for again when the process ends, and be said then

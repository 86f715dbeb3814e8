"""FlashInfer is called as its real wrappers want to be: calls are bound against signatures that were read in its
packages, flashinfer-python 0.6.4 and 0.7.2.post1; and nothing of a plan makes the host wait for the device."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.harness.batches import spec
from quintet.interface.types import MaxShape, ShapeBucket
from quintet.platforms.cuda import flashinfer
from quintet.platforms.cuda.platform import CUDA

DECODE, PREFILL = flashinfer.NEEDED
MADE = "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, "
BUFFERS = "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, "
ROPE = "rope_scale=None, rope_theta=None, "
RESET = "float_workspace_buffer, int_workspace_buffer"
DECODE_PLAN = "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
PREFILL_PLAN = (
    "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, "
    "page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', "
    f"use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, {ROPE}q_data_type='float16', "
    "kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, "
    "token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, "
    "max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False"
)
RUN = "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False"
SIGNATURES = {
    "0.6.4": {
        (DECODE, "__init__"): f"{MADE}use_tensor_cores=False, {BUFFERS}backend='auto', jit_args=None",
        (DECODE, "plan"): f"{DECODE_PLAN}pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, "
        f"q_data_type='float16', kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, {ROPE}"
        "non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False",
        (PREFILL, "plan"): PREFILL_PLAN,
    },
    "0.7.2.post1": {
        (DECODE, "__init__"): f"{MADE}use_tensor_cores=False, {BUFFERS}backend='auto', jit_args=None",
        # what plan() hands on to, where nothing but these is given by position
        (DECODE, "plan"): f"{DECODE_PLAN}*, pos_encoding_mode='NONE', window_left=-1, window_right=0, "
        "logits_soft_cap=None, q_data_type='float16', kv_data_type=None, o_data_type=None, data_type=None, "
        f"sm_scale=None, {ROPE}non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, "
        "disable_split_kv=False, q_len_per_req=1, is_causal=None",
        (PREFILL, "plan"): f"{PREFILL_PLAN}, uniform_q_len=None",
    },
}
ALIKE = {
    (PREFILL, "__init__"): f"{MADE}qo_indptr_buf=None, paged_kv_indptr_buf=None, paged_kv_indices_buf=None, "
    "paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, "
    "jit_kwargs=None",
    **{(name, "reset_workspace_buffer"): RESET for name in flashinfer.NEEDED},
    **{(name, "run"): RUN for name in flashinfer.NEEDED},
}


class OnDevice(Tensor):
    """In the place of a tensor on the device."""


class Recorder:
    """Stands for the module: every call is bound to the signature of that version, and noted."""

    def __init__(self, version: str) -> None:
        self.noted: list[tuple[str, str, dict[str, Any]]] = []
        for name in flashinfer.NEEDED:
            setattr(self, name, self._wrapper(name, {**SIGNATURES[version], **ALIKE}))

    def _wrapper(self, name: str, signatures: dict[tuple[str, str], str]) -> type:
        members: dict[str, Any] = {flashinfer.PINNED: None}
        for (owner, method), parameters in signatures.items():
            if owner == name:
                made: Any = eval(f"lambda {parameters}: None")  # noqa: S307  # the text above
                members[method] = self._method(name, method, inspect.signature(made))
        return type(name, (), members)

    def _method(self, name: str, method: str, signature: inspect.Signature) -> Any:
        def called(wrapper: Any, *args: Any, **more: Any) -> Any:
            bound = signature.bind(*args, **more)
            self.noted.append((name, method, dict(bound.arguments)))
            if method == "reset_workspace_buffer":
                setattr(wrapper, flashinfer.PINNED, torch.zeros(3))
            if method == "run":
                return torch.ones_like(bound.arguments["q"])
            return None

        return called


PINNED: list[Tensor] = []


def means() -> flashinfer.DeviceFunctions:
    def pinned(nbytes: int) -> Tensor:
        PINNED.append(torch.empty(nbytes, dtype=torch.uint8))
        return PINNED[-1]

    def empty(shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype).as_subclass(OnDevice)

    return flashinfer.DeviceFunctions(empty, torch.zeros(1).as_subclass(OnDevice), pinned=pinned)


OF = spec(8, 2, 64, dtype=torch.bfloat16, window=20, softcap=3.0)


@pytest.mark.parametrize("version", SIGNATURES)
def test_every_call_binds_to_the_real_signature(version: str) -> None:
    module: Any = Recorder(version)
    assert flashinfer.trial(OF, module, means()) is None
    assert [(name, method) for name, method, _ in module.noted] == [
        (name, method) for name in (DECODE, PREFILL) for method in ("__init__", "reset_workspace_buffer", "plan", "run")
    ]
    for name, method, given in module.noted:
        if method == "plan":
            assert given["seq_lens"].tolist() == [1 if name == DECODE else 2], "no version counts them itself"


@pytest.mark.parametrize("version", SIGNATURES)
def test_a_plan_has_its_pages_on_the_device_and_the_rest_in_pinned_memory(version: str) -> None:
    """FlashInfer copies pages of the host's and waits; it asks a device for the numbers that it plans with."""
    module: Any = Recorder(version)
    planner = flashinfer.GroupPlanner(OF, module, means(), (1,))
    for count in (1, 2, 1):
        PINNED.clear()
        planner.plan(*flashinfer._trial_step(count))
        given = next(given for _, method, given in reversed(module.noted) if method == "plan")
        assert len(PINNED) == 1, "all in one"
        first, end = PINNED[0].data_ptr(), PINNED[0].data_ptr() + PINNED[0].nbytes
        numbers = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        on_device = {name for name, x in numbers.items() if isinstance(x, OnDevice)}
        assert on_device == {"indices" if count == 1 else "paged_kv_indices"}
        assert all(first <= x.data_ptr() < end for name, x in numbers.items() if name not in on_device)


def test_all_sizes_of_a_group_share_one_room_for_plans() -> None:
    module: Any = Recorder("0.7.2.post1")
    planner = flashinfer.GroupPlanner(OF, module, means(), (1, 2))
    for count in (1, 2):
        batch, group = flashinfer._trial_step(1)
        if count == 2:
            batch = batch._replace(
                token_ids=batch.token_ids.repeat(2), query_start_loc=batch.query_start_loc.repeat(2)[[0, 2, 2]] * 0
            )
            batch.query_start_loc[1:] = 1, 2
            group = group._replace(seq_lens=group.seq_lens.repeat(2), block_table=group.block_table.repeat(2, 0))
        planner.plan(batch, group)
    planner.plan(*flashinfer._trial_step(2))
    rooms = [given["int_workspace_buffer"] for _, method, given in module.noted if method == "reset_workspace_buffer"]
    assert len(rooms) == 3 and len({room.data_ptr() for room in rooms}) == 1 and rooms[0].nbytes == flashinfer.PLANS
    wrappers = [*planner._decoders.values(), planner._prompts]
    assert len({id(getattr(wrapper, flashinfer.PINNED)) for wrapper in wrappers}) == 1, "and one piece of pinned memory"


def test_what_plans_take_is_counted() -> None:
    buckets = [ShapeBucket(size, size, size, (width, 64), decode=True) for size in (4, 8) for width in (64, 256)]
    each = flashinfer.PLANS + 4 * (8 * (64 + 256) + 2 * (2 * 8 + 1))
    assert flashinfer.planned_bytes(buckets, 2) == 2 * each
    planner = flashinfer.FlashInferPlanner(OF, Recorder("0.6.4"), means(), ())
    planners = {(0, "a"): planner, (0, "b"): "refused", (1, "a"): planner}
    stands: Any = type("Stands", (), {"_planners": planners, "_prompts": {}})()
    assert CUDA._library_bytes(stands, buckets, MaxShape(ShapeBucket(64, 8, 8, (64, 64)), 16, 97)) == 2 * each

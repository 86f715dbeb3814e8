"""torchax is loaded without a trace (JAX itself sets two variables): nobody else's torch or random numbers notice."""

import subprocess
import sys

import pytest

from tests.helpers.platforms.tpu import needs_jax

pytestmark = needs_jax

UNTOUCHED = """
import os, jax, torch
before = dict(os.environ), torch.backends.mha.get_fastpath_enabled(), torch.accelerator.current_accelerator()
lookup = torch._ops.OpOverloadPacket.__getattr__
from quintet.platforms.tpu import torchax_bridge as bridge
after = dict(os.environ), torch.backends.mha.get_fastpath_enabled(), torch.accelerator.current_accelerator()
assert before == after, (before[1:], after[1:], set(after[0].items()) - set(before[0].items()))
assert torch._ops.OpOverloadPacket.__getattr__ is lookup
assert torch._C._get_privateuse1_backend_name() == "privateuseone" and not hasattr(torch, "jax")
with torch.random.fork_rng():
    torch.rand(1)
try:
    torch.ops.aten.all.dimname
except AttributeError:
    print("as before")
"""


@pytest.mark.slow
def test_nothing_changes_for_others() -> None:
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True)
    assert done.stdout == "as before\n", done.stderr


def test_tensors_of_the_bridge_compute_inside_of_a_trace_alone() -> None:
    import jax.numpy as jnp
    import torch

    from quintet.platforms.tpu.torchax_bridge import jax_view, torch_view, tracing

    x = torch_view(jnp.arange(6.0).reshape(2, 3))
    with pytest.raises(AssertionError):
        x + 1
    with tracing():
        y = (x + 1)[1].to(torch.bfloat16)
    assert jax_view(y).tolist() == [4, 5, 6] and jax_view(y).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "float8_e4m3fn"])
def test_host_tensors_keep_their_bits(name: str) -> None:
    import jax
    import numpy as np
    import torch

    from quintet.platforms.tpu.device import from_host_array
    from quintet.platforms.tpu.torchax_bridge import dtype_of, host_array

    x = torch.arange(-3, 5).abs().to(getattr(torch, name))
    array = jax.device_put(host_array(x))
    assert array.dtype == dtype_of(x.dtype) and array.astype("float32").tolist() == x.float().tolist()
    if not name.startswith("float8"):
        assert torch.equal(from_host_array(np.array(array)), x)

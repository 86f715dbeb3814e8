"""The platform that takes the place of `cuda` when `make gpu` is rehearsed: a GPU of the host's memory."""

from quintet.interface.platform import CONTRACT_VERSION
from quintet.platforms.gpu.platform import GPU
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime

GIB = 2**30
INTERPRETED = ("rms_norm", "rotary")  # by Triton's interpreter; a model with all ops so takes minutes for a token


class Stand(FakeGPU):
    """Named as the device that it stands in for, so that every command is the one that runs there."""

    name = "cuda"
    contract = CONTRACT_VERSION
    op_priority = {name: order for name, order in GPU.op_priority.items() if name in INTERPRETED}
    _fake = FakeRuntime(4 * GIB)

"""What explain says of ranks' tokens: only weights that are rounded row by row keep those of one process."""

import pytest

from quintet.config import EngineConfig
from quintet.engine.startup import prepare

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")


@pytest.mark.parametrize(
    ("ranks", "quantization", "says"),
    [
        (1, None, []),
        (2, None, ["ranks: sums round in another order than in one process"]),
        (2, "int4", ["ranks: sums round in another order than in one process"]),
        (2, "w8a8", ["ranks: tokens are those of one process, to the bit"]),
    ],
)
def test_explain_says_which_ranks_keep_tokens(ranks: int, quantization: str | None, says: list[str]) -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=ranks, quantization=quantization)
    found = [each for each in prepare(config, met=False).reasons if each.startswith("ranks:")]
    assert len(found) == len(says) and all(each.startswith(start) for each, start in zip(found, says, strict=True))

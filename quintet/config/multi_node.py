"""Ranks on several machines, and who starts them."""

from dataclasses import dataclass
from typing import Any

from quintet.common.value_parsers import count, text
from quintet.config.schema.fields import option

PORT = 29501


def _port(value: Any) -> int:
    number = int(count(1)(value))
    if number > 65535:
        raise ValueError(f"must be a port from 1 to 65535, not {value!r}")
    return number


@dataclass(frozen=True)
class NodeOptions:
    """Number of machines, this machine's rank, and the address at which they meet."""

    nnodes: int = option(
        1, count(), "machines that share each layer: tensor_parallel_size is of all together", group="nodes",
        flags=("-n",),
    )  # fmt: skip
    node_rank: int = option(
        0, count(0), "which of them this is, from 0; that one takes the requests, the others follow it", group="nodes",
        flags=("-r",),
    )  # fmt: skip
    master_addr: str = option(
        "127.0.0.1", text, "address of machine 0 by which the others reach it, and on which it listens for them",
        group="nodes", metavar="ADDRESS",
    )  # fmt: skip
    master_port: int = option(PORT, _port, "port of that address", group="nodes")

    def _check(self: Any) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank {self.node_rank} is none of {self.nnodes} machines (nnodes), which count from 0; give "
                "nnodes on all of them"
            )
        if self.nnodes == 1:
            return
        if self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"tensor_parallel_size {self.tensor_parallel_size} cannot be shared out over {self.nnodes} machines "
                "(nnodes); it is of all together, and each has as many"
            )
        if self.data_parallel_size > 1:
            raise ValueError(
                f"nnodes {self.nnodes}: engines are of one machine each; start a server on each (data_parallel_size) "
                "and a balancer before them, or leave data_parallel_size out"
            )
        if self.distributed_executor_backend not in (None, "mp", "external_launcher"):
            raise ValueError(
                f"distributed_executor_backend={self.distributed_executor_backend!r} starts the ranks of all machines "
                "itself; leave it out, or nnodes"
            )

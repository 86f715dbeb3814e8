"""Process of one model's engine: `quintet serve` on a Unix socket, with a key that only its parent knows."""

import os
import signal
import sys
from typing import Any

import msgspec

from quintet.common.logging_setup import install_server_log
from quintet.common.processes import PARENT_GONE, follow_parent, read_orders
from quintet.config import EngineConfig
from quintet.server.config import ServerConfig
from quintet.server.listen import listen


class ModelOrders(msgspec.Struct):
    """Start orders. The key goes through a pipe, which no other process can read."""

    engine: dict[str, Any]  # EngineConfig's fields
    server: dict[str, Any]  # ServerConfig's fields


def main() -> int:
    """Serves until its parent asks it to end, or is gone."""
    orders = read_orders(ModelOrders)
    follow_parent(lambda why: os.kill(os.getpid(), signal.SIGTERM))
    try:
        server = ServerConfig(**orders.server)
        install_server_log(orders.server)
        from quintet.server.processes.supervisor import Supervisor

        return Supervisor(EngineConfig(**orders.engine), server, listen(server)).run()
    except (ValueError, OSError, MemoryError) as error:
        print(f"quintet serve: error: {error or type(error).__name__}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code if code != PARENT_GONE else 1)

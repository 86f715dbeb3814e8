"""The server that is measured: what `quintet serve` runs, with settings from standard input, on a socket file."""

import dataclasses
import os
import signal
import sys
import threading
from typing import Any

from quintet.common.logging_setup import install_server_log
from quintet.common.processes import read_orders
from quintet.config import EngineConfig
from quintet.server.config import ServerConfig
from quintet.server.listen import listen
from quintet.server.processes.supervisor import Supervisor


def main() -> int:
    """Serves until standard input ends, as it does with who started this."""
    orders = read_orders(dict[str, Any])
    settings = ServerConfig(uds=orders["uds"], access_log=False, log_level="warning")
    install_server_log(dataclasses.asdict(settings))
    supervisor = Supervisor(EngineConfig(**orders["engine"]), settings, listen(settings))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return supervisor.run()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

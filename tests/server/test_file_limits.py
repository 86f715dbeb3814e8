"""Open files and connections: the one limit is raised, or the other lowered and said."""

import subprocess
import sys

TRIES = """
import logging, resource
from quintet.server.file_limits import fit_file_limit
from quintet.server.config import ServerConfig

logging.basicConfig(format="%(message)s", level="INFO")

def limits():
    return resource.getrlimit(resource.RLIMIT_NOFILE)

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000))
print(fit_file_limit(ServerConfig(max_connections=300)).max_connections, 300 < limits()[0] < 1000)
print(fit_file_limit(ServerConfig(max_connections=100)).max_connections, 300 < limits()[0] < 1000)
few = fit_file_limit(ServerConfig(max_connections=4096)).max_connections
print(800 < few < 1000 - 50, limits()[0])
print(fit_file_limit(ServerConfig(max_connections=4096, api_workers=8)).max_connections < few)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    fit_file_limit(ServerConfig())
except ValueError as error:
    print(error)
"""


def test_the_system_lets_a_server_have_its_connections_or_it_takes_fewer() -> None:
    done = subprocess.run([sys.executable, "-c", TRIES], capture_output=True, text=True, timeout=60)
    *lines, refused = done.stdout.splitlines()
    assert lines == ["300 True", "100 True", "True 1000", "True"], done
    assert "a process may have 64 files open here" in refused and "ulimit -n" in refused
    said = done.stderr.splitlines()
    assert len(said) == 2 and all(line.startswith("max_connections is ") for line in said)
    assert said[0].endswith(", not 4096: a process may open 1000 files (ulimit -n)")

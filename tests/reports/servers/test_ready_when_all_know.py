"""/ready of a server with several API processes is 200 when all of them know the model (attack A13)."""

from pathlib import Path

from quintet.engine.processes import messages as wire
from quintet.server.processes.remote_backend import RemoteBackend, may_serve
from tests.server.processes.test_remote_backend import Engine, model, ready


async def test_a_process_takes_no_connection_before_the_first_process_knows(tmp_path: Path) -> None:
    """Process 0 takes connections from the start, so an answer of another one would speak for it, too."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    first, second = Engine(tmp_path), RemoteBackend(tmp_path, 1, step_timeout=10)
    second._admission = object()  # type: ignore[assignment]
    second._served = model(tokenizer)
    assert second.unavailable_reason() is None and not may_serve(second)
    first.say(wire.Pulse(None, 0.0, 1.0))
    await ready(first, tokenizer)
    assert may_serve(first.remote) and may_serve(second)
    second.close()
    first.close()

"""Sleep of an engine: its levels, and the tags of what sleeps, by the names that vLLM gives them."""

from collections.abc import Sequence
from typing import Any, Protocol

from quintet.common.suggestions import refuse_unknown

TAGS = ("weights", "kv_cache")


def check_tags(tags: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the parts of an engine to wake: all if tags is None. ValueError if they name anything else."""
    if tags is None:
        return TAGS
    given = [tags] if isinstance(tags, str) else list(tags)
    refuse_unknown("tag", given, TAGS)
    if not given:
        raise ValueError(f"tags=[] wakes nothing; give {' or '.join(TAGS)}, or leave it out")
    return tuple(each for each in TAGS if each in given)


def check_sleep(level: int, asleep: int, num_requests: int, updating: bool) -> None:
    """ValueError if an engine may not sleep at this level. `asleep`: the level at which it sleeps now, 0 if awake."""
    from quintet.interface.platform import ASIDE, DROPPED  # imports torch, which a server's HTTP side does without

    if level not in (ASIDE, DROPPED):
        raise ValueError(f"level must be {ASIDE} (weights are put aside) or {DROPPED} (dropped), not {level!r}")
    if asleep not in (0, level):
        raise ValueError(f"the engine sleeps at level {asleep}; wake it up before it sleeps at level {level}")
    if num_requests:
        raise ValueError(f"the engine has {num_requests} requests; let them finish, or abort them, before it sleeps")
    if updating:
        raise ValueError("a weight update is open, or has failed; end it, or reload_weights(), before it sleeps")


def parts_to_wake(tags: Sequence[str] | None, asleep: int, weights_awake: bool) -> tuple[str, ...]:
    """Returns which parts of an engine are still to wake: none if it is awake. ValueError: the cache before the
    weights."""
    wakes = check_tags(tags)
    if not asleep:
        return ()
    if "weights" not in wakes and not weights_awake:
        raise ValueError("tags=['kv_cache'], and the weights sleep; wake them before the cache, or with it")
    return tuple(each for each in wakes if each != "weights" or not weights_awake)


class Sleeps(Protocol):
    """An engine, or several, that can sleep."""

    def sleep(self, level: int) -> Any: ...
    def wake_up(self, tags: Sequence[str] | None = None) -> None: ...


def release_kv_cache_memory(engine: Sleeps) -> None:
    """Gives the memory of the KV cache back until wake_up(["kv_cache"]); weights are put aside for a moment."""
    engine.sleep(1)
    engine.wake_up(["weights"])


def check_weights_awake(asleep: int, weights_awake: bool) -> None:
    """ValueError while the weights sleep."""
    if asleep and not weights_awake:
        raise ValueError(f"the weights are asleep (level {asleep}); call wake_up(tags=['weights']) first")

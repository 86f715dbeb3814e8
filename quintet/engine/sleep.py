"""Tags of what sleeps in an engine, by the names that vLLM gives them."""

from collections.abc import Sequence

from quintet.common.suggestions import refuse_unknown

TAGS = ("weights", "kv_cache")


def check_tags(tags: Sequence[str] | None) -> None:
    """ValueError if they name less than all that sleeps, or anything else."""
    if tags is None:
        return
    given = [tags] if isinstance(tags, str) else list(tags)
    refuse_unknown("tag", given, TAGS)
    if set(given) != set(TAGS):
        raise ValueError(f"tags={given} would wake a part of the engine; weights and cache wake together, leave it out")

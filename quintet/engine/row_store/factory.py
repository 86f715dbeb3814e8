"""Makes the row store's parts by the settings."""

from typing import TYPE_CHECKING

from quintet.config import EngineConfig
from quintet.engine.row_store.items import EMBEDS_ROWS
from quintet.engine.row_store.manager import RowStoreManager
from quintet.interface.platform import Capabilities
from quintet.layers.row_store import PAGE_ROWS, RowStoreSizes

if TYPE_CHECKING:
    from quintet.engine.executor.worker import Worker
    from quintet.engine.media.factory import ServedMedia


MEDIA_ROWS = 8192  # by default, where media are served: a large one, and the next


def row_store_sizes(
    config: EngineConfig, facts: Capabilities, platform: str, max_model_len: int, media: "ServedMedia"
) -> RowStoreSizes | None:
    """Returns the room for rows on a device; None: no request brings any. ValueError if the platform has none, or if
    there are rows for nothing."""
    if not config.enable_prompt_embeds and media.sizes is None:
        if config.encoder_cache_rows is not None:
            raise ValueError(
                f"encoder_cache_rows={config.encoder_cache_rows}: no request brings rows; set "
                "enable_prompt_embeds=True, or leave it out"
            )
        return None
    if facts.ops_only and not facts.lora:
        raise ValueError(
            f"enable_prompt_embeds: platform {platform} writes no rows of what it has placed (Capabilities.lora is "
            "False); leave it out, or run the model on another platform"
        )
    rows = config.encoder_cache_rows
    if rows is None:
        prompt = 0 if config.enable_chunked_prefill else max_model_len  # a step has all of a prompt
        pictures = min(2 * max_model_len, MEDIA_ROWS) if media.sizes is not None else 0
        rows = max(config.step_tokens, prompt, pictures, 2 * EMBEDS_ROWS)
    return RowStoreSizes(
        -(-rows // PAGE_ROWS) * PAGE_ROWS, not facts.ops_only, media.whole_runs, media.deep_layers,
        media.whole_prompts and config.runner != "pooling",
    )  # fmt: skip


def make_row_store(sizes: RowStoreSizes | None) -> RowStoreManager | None:
    """Makes the bookkeeping of the rows; None: there are none."""
    return None if sizes is None else RowStoreManager(sizes.rows, sizes.whole_runs)


def describe_row_store(worker: "Worker") -> list[str]:
    """Describes the memory of the rows."""
    store = worker.row_store
    if store is None:
        return []
    return [
        f"encoder_cache_rows={store.nbytes // store.row_bytes - PAGE_ROWS}: {store.row_bytes} bytes each, "
        f"{store.nbytes / 2**30:.2f} GiB, which are counted among the weights"
    ]


def max_embeds_rows(config: EngineConfig, sizes: RowStoreSizes | None) -> int:
    """Returns how many embeddings a prompt may have, where a step computes all of it; 0: as many as max_model_len."""
    return 0 if sizes is None or config.enable_chunked_prefill else sizes.rows

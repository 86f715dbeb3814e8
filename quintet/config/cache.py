"""Options for the length of requests, and the memory of the KV cache."""

from dataclasses import dataclass
from typing import Any

from quintet.common.value_parsers import boolean, count, finite_number, fraction, integer, json_object, optional, text
from quintet.config.schema.fields import choice_field, option

GIB = 2**30
LMCACHE = "lmcache"


def _length(value: Any) -> int | str:
    return "auto" if value in ("auto", -1, "-1") else int(count()(value))


def _gib(value: Any) -> float:
    """A number of GiB, as vLLM takes it, or an amount with its unit: 0.5, "512M", "2GiB"."""
    if isinstance(value, str) and value.strip() and not value.strip()[-1].isdigit():
        return integer(value) / GIB
    size = -1.0 if isinstance(value, bool) else finite_number(value)
    if size <= 0:
        raise ValueError(f"must be over 0, in GiB (or an amount such as 512M), not {value!r}")
    return size


@dataclass(frozen=True)
class MemoryOptions:
    """Use of a device's memory."""

    max_model_len: int | str | None = option(
        None, optional(_length), "tokens of prompt and output together (4k, 4K), or auto: as many as fit; "
        "the model's own length if not given", group="memory", metavar="TOKENS",
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9,
        fraction,
        "share of the device's memory (a CPU's: the host's) that may be used",
        group="memory",
        metavar="SHARE",
    )
    kv_cache_memory_bytes: int | None = option(
        None, optional(count()), "memory of the KV cache (2G), instead of a share of the device's", group="memory",
        metavar="BYTES",
    )  # fmt: skip
    num_pages: int | None = option(
        None, optional(count(2)), "pages of the KV cache, instead of what fits; page 0 holds nothing", group="memory",
        aliases=("num_gpu_blocks_override",),
    )  # fmt: skip
    page_size: int = option(16, count(), "tokens in one page of the KV cache", group="memory", aliases=("block_size",))
    kv_cache_dtype: str = choice_field(
        "auto", "auto", "int8", "fp8", "fp8_e5m2", "int4", fp8_e4m3="fp8", int8_per_token_head="int8",
        int4_per_token_head="int4", help="of the KV cache; auto: the weights'; int8: half of 16 bits and a scale for "
        "each head of each token; fp8 (e4m3): half, with the checkpoint's scales if it has some; fp8_e5m2: half, "
        "without scales; int4: 5 bits a value, with a scale and a minimum for each 32 values", group="memory",
    )  # fmt: skip
    calculate_kv_scales: bool = option(
        False, boolean, "with kv_cache_dtype fp8: compute the scales of K and V for each head, from a first prompt of "
        "random tokens, in the place of the checkpoint's", group="memory",
    )  # fmt: skip
    enable_prefix_caching: bool = option(
        True, boolean, "keep pages of finished requests for prompts that begin alike", group="memory"
    )

    kv_offloading_size: float | str | None = option(
        None, optional(_gib), "GiB of host memory beside the KV cache, for pages that it has no room for (all ranks "
        "together)", group="memory", metavar="GIB",
    )  # fmt: skip
    kv_offloading_backend: str = choice_field(
        "native", "native", LMCACHE, help="who keeps them: native, the engine itself; lmcache, LMCache, where it is "
        "installed, as its file and variables say (LMCACHE_CONFIG_FILE)", group="memory",
    )  # fmt: skip
    kv_offloading_lmcache: dict[str, Any] | None = option(
        None, optional(json_object), "settings of LMCache's by its names, before those of its file and variables",
        group="memory", metavar="JSON",
    )  # fmt: skip
    kv_offloading_policy: str = choice_field(
        "lru", "lru", "arc", help="which go first: those not used for longest, or by ARC, which also heeds how often",
        group="memory",
    )  # fmt: skip
    kv_offloading_folder: str | None = option(
        None, optional(text), "folder for such pages, behind host memory; what lies there is found by later starts",
        group="memory", metavar="FOLDER",
    )  # fmt: skip
    kv_offloading_folder_size: float | str = option(
        16.0, _gib, "GiB that they may take there", group="memory", metavar="GIB"
    )
    kv_load_failure_policy: str = choice_field(
        "recompute", "recompute", "fail", help="if a page of the KV connector does not arrive: compute it, or end the "
        "request with an error", group="memory",
    )  # fmt: skip

    def _check(self) -> None:
        self._check_kv_offloading()
        if self.calculate_kv_scales and self.kv_cache_dtype != "fp8":
            raise ValueError(
                f"calculate_kv_scales is for kv_cache_dtype='fp8', and it is {self.kv_cache_dtype!r}, which has no "
                "such scales; leave it out"
            )
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_pages and kv_cache_memory_bytes both fix the KV cache's size; give one of them")

    @property
    def stores_kv_externally(self) -> bool:
        """True if KV pages that this engine computed are also kept outside its KV cache: KV offloading or LMCache."""
        return self.kv_offloading_size is not None or self.kv_offloading_backend == LMCACHE

    def _check_kv_offloading(self) -> None:
        if self.kv_offloading_backend == LMCACHE:
            if self.kv_offloading_folder is not None:
                raise ValueError(
                    "kv_offloading_folder is for kv_offloading_backend='native'; LMCache's folder is its local_disk "
                    "(kv_offloading_lmcache)"
                )
            if self.kv_offloading_policy != "lru":
                raise ValueError(
                    f"kv_offloading_policy={self.kv_offloading_policy!r} is for kv_offloading_backend='native'; "
                    "LMCache's is its cache_policy (kv_offloading_lmcache)"
                )
        elif self.kv_offloading_lmcache is not None:
            raise ValueError(
                "kv_offloading_lmcache is for kv_offloading_backend='lmcache'; give that, too, or leave it out"
            )
        if self.kv_offloading_folder is not None and self.kv_offloading_size is None:
            raise ValueError(
                "kv_offloading_folder: pages come to the folder by way of host memory; give kv_offloading_size, too"
            )

"""Process that puts the tokenizer of a GGUF file into the cache while this one imports torch."""

import contextlib
import subprocess
import sys

import msgspec

from quintet.common.processes import Child, read_orders
from quintet.config import EngineConfig
from quintet.hub.model_names import tokenizer_file
from quintet.tokenizers.tokenizer import is_missing_in_cache, load_tokenizer

MODULE = "quintet.tokenizers.cache_process"


class TokenizerOrders(msgspec.Struct):
    """Start orders of the process."""

    file: str


def start(config: EngineConfig) -> Child | None:
    """Starts the process, which ends with this one; None where the cache has the tokenizer or cannot keep it, or
    none is read from a GGUF file. load_tokenizer() waits for it."""
    file = tokenizer_file(config)
    if file is None or not is_missing_in_cache(file):
        return None
    try:
        return Child(MODULE, TokenizerOrders(str(file)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:  # no room for a process: this one reads the vocabulary
        return None


def main() -> int:
    orders = read_orders(TokenizerOrders)
    with contextlib.suppress(OSError, ValueError):  # the process that needs the tokenizer reports it
        load_tokenizer(orders.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

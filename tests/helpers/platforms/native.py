"""The CPU platform's native providers, as the tests of kernels call them."""

from collections.abc import Callable
from typing import Any

from quintet.ops import Op


def native(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = Op.registry[name].providers["native"]
    return function

"""NumPy, imported at the first use of one of its names: processes that get no media keep it out of their memory.

`from quintet.media.lazy_numpy import np`. Modules that do so name NDArray in annotations alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
else:

    class _LazyNumpy:
        """Stands in for the module; names stay here once they were used."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)
            return value

    np = _LazyNumpy()

__all__ = ["np"]

"""A process beside this one that says what ran here when this one died: a crash lets nobody else speak."""

import contextlib
import subprocess
import sys
from types import TracebackType

_CODE = """
import sys
last = ""
for line in sys.stdin:
    last = line.strip()
if last:
    print(last, file=sys.stderr)
"""


class Witness:
    """Within `with`, the last line that was told is printed on standard error if this process ends there at once: by a
    segmentation fault, by the kernel for want of memory, by a time limit. An exception or Ctrl-C speaks for itself."""

    def __enter__(self) -> "Witness":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _CODE],
            stdin=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True,  # Ctrl-C is not for it
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.tell("")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def tell(self, line: str) -> None:
        """What is to be said if nothing is told after it; "" is nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody ended it: that costs the line, and no more
            print(" ".join(line.split()), file=self._process.stdin, flush=True)

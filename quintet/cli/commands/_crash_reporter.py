"""Child process that prints what ran here if this process dies: after a crash this one cannot report it itself."""

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


class CrashReporter:
    """Within `with`, the last line passed to tell() is printed on standard error if this process dies at once: by a
    segmentation fault, by the kernel for want of memory, by a time limit. An exception or Ctrl-C prints nothing."""

    def __enter__(self) -> "CrashReporter":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _CODE],
            stdin=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True,  # Ctrl-C is not for it
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.set_line("")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def set_line(self, line: str) -> None:
        """Sets the line to print if this process dies before the next call; "" prints nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child was killed: only the line is lost
            print(" ".join(line.split()), file=self._process.stdin, flush=True)

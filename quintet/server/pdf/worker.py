"""Process that extracts the text of one PDF file under limits of processor time and memory. Run by extract.py."""

import contextlib
import logging
import os
import resource
from typing import TYPE_CHECKING

import msgspec

from quintet.common.processes import follow_parent, read_orders

if TYPE_CHECKING:
    import pypdf

SECONDS = 20  # of processor time
MEMORY = 2**30  # bytes of address space
MAX_PAGES = 1000
MAX_CHARACTERS = 1_000_000
_MAX_RESULT = 8 * 2**20  # bytes: a character has up to 6 in JSON


class Orders(msgspec.Struct, array_like=True):
    """File descriptors: the PDF, and an empty file for the result."""

    source: int
    result: int


class Extracted(msgspec.Struct):
    """Text of a file, or the reason why it has none."""

    text: str = ""
    pages: int = 0
    error: str = ""
    lacking: bool = False  # the error names a package that the server lacks


def main() -> None:
    """Writes the result as JSON. Writes nothing if a limit ends the process."""
    orders = read_orders(Orders)
    follow_parent()
    os.nice(19)  # a file that takes all its time must not slow down what is generated
    import pypdf  # its import is outside the limits
    from pypdf.errors import DependencyError

    limits = {resource.RLIMIT_AS: MEMORY, resource.RLIMIT_FSIZE: _MAX_RESULT, resource.RLIMIT_CORE: 0}
    for kind, limit in {**limits, resource.RLIMIT_CPU: SECONDS}.items():
        resource.setrlimit(kind, (limit, limit))
    logging.disable()  # pypdf warns of each damaged object
    with os.fdopen(orders.source, "rb") as source, os.fdopen(orders.result, "wb") as result:
        source.seek(0)
        try:
            extracted = _extract(pypdf.PdfReader(source))
        except MemoryError:
            return
        except DependencyError as error:
            extracted = Extracted(error=_encodable(error), lacking=True)
        except Exception as error:  # pypdf raises errors of any type for damaged files
            extracted = Extracted(error=f"pypdf fails with {type(error).__name__}: {_encodable(error)}")
        with contextlib.suppress(MemoryError):
            result.write(msgspec.json.encode(extracted))


def _encodable(error: Exception) -> str:
    return str(error)[:200].encode(errors="replace").decode()


def _extract(reader: "pypdf.PdfReader") -> Extracted:
    if reader.is_encrypted and not reader.decrypt(""):  # many are locked against changes alone
        return Extracted(error="it is encrypted; attach a copy without a password")
    if len(reader.pages) > MAX_PAGES:
        return Extracted(error=f"it has {len(reader.pages)} pages, and {MAX_PAGES} are read; attach a part of it")
    texts, characters = [], 0
    for page in reader.pages:
        text = page.extract_text().replace("\0", "").encode(errors="replace").decode().strip()
        characters += len(text)
        if characters > MAX_CHARACTERS:
            return Extracted(error=f"it has more than {MAX_CHARACTERS} characters of text; attach a part of it")
        texts.append(text)
    if not characters:
        return Extracted(error="it has no text, only pictures or empty pages; attach its text")
    return Extracted("\n\n".join(filter(None, texts)), len(texts))


if __name__ == "__main__":
    main()

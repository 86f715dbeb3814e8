"""Process that makes prompts with media ready for a model. Run by client.py."""

from io import FileIO
from typing import BinaryIO

import msgspec
import numpy as np

from quintet.media.file_child import serve_orders
from quintet.media.items import DecodedMedia, MediaProcessor
from quintet.media.load_processor import load_processor
from quintet.media.processes.messages import ProcessAnswer, ProcessOrder, PromptHead, encode_prompt

_LONGEST = 2000  # characters of an error


class _Processing:
    """Answers orders; the processor is loaded by the first."""

    def __init__(self) -> None:
        self._processor: MediaProcessor | None = None

    def run(self, line: bytes, source: FileIO, result: BinaryIO) -> ProcessAnswer:
        order = msgspec.json.decode(line, type=ProcessOrder)
        data = source.readall()
        head = msgspec.msgpack.decode(data[: order.head], type=PromptHead)
        try:
            if self._processor is None:
                self._processor = load_processor(head.model)
        except (ValueError, OSError, MemoryError) as error:
            return ProcessAnswer(error=_shown(error), failed=True)
        try:
            made = self._processor.process(head.prompt, _media(head, data, order.head), head.options)
        except (ValueError, MemoryError) as error:
            return ProcessAnswer(error=_shown(error))
        encoded = encode_prompt(made)
        result.write(encoded)
        return ProcessAnswer(len(encoded))


def _media(head: PromptHead, data: bytes, start: int) -> list[DecodedMedia]:
    """Returns the media, whose arrays lie behind one another."""
    found = []
    for each in head.media:
        dtype = np.dtype(each.dtype)
        count = int(np.prod(each.shape))
        array = np.frombuffer(data, dtype, count, start).reshape(each.shape)
        found.append(DecodedMedia(each.kind, array, each.rate, each.uuid, each.times))
        start += array.nbytes
    return found


def _shown(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_LONGEST].encode(errors="replace").decode()


def main() -> None:
    """Answers each ProcessOrder with a ProcessAnswer."""
    serve_orders(_Processing().run)


if __name__ == "__main__":
    main()

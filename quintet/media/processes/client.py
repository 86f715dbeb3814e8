"""A model's processor of media, in a child process."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quintet.media.families import MediaModel
from quintet.media.file_child import FileChild
from quintet.media.items import DecodedMedia, ProcessedPrompt
from quintet.media.lazy_numpy import np
from quintet.media.processes.messages import GivenMedia, ProcessAnswer, ProcessOrder, PromptHead, decode_prompt

logger = logging.getLogger(__name__)

STARTING = 300.0  # seconds in which transformers is imported from a slow disk, and the processor loaded
PATIENCE = 120.0  # seconds for one prompt
_ENDED = "the process that makes media ready for the model ended; send smaller or fewer media, or other options"


class ProcessorProcess:
    """MediaProcessor whose work is done in a child process. Threads may share one; calls take turns.

    The process starts with the first prompt, and again after it has ended.
    """

    def __init__(self, model: MediaModel, timeout: float = PATIENCE) -> None:
        """`timeout`: seconds for one prompt, without the start of the process."""
        self._model, self._timeout = model, timeout
        self._child: FileChild | None = None
        self._lock = threading.Lock()

    def process(
        self, prompt: str | Sequence[int], media: Sequence[DecodedMedia], options: Mapping[str, Any]
    ) -> ProcessedPrompt:
        """See MediaProcessor. RuntimeError if the processor cannot be loaded."""
        arrays = [np.ascontiguousarray(each.data) for each in media]
        given = [
            GivenMedia(each.kind, array.dtype.name, list(array.shape), each.rate, each.uuid, each.times)
            for each, array in zip(media, arrays, strict=True)
        ]
        text = prompt if isinstance(prompt, str) else list(prompt)
        head = msgspec.msgpack.encode(PromptHead(self._model, text, given, dict(options)))
        with self._lock:
            if self._child is not None and not self._child.is_running:
                self._end()
            if self._child is None:
                self._child = FileChild("quintet.media.processes.worker")
            try:
                return self._ask(self._child, head, [each.reshape(-1).view(np.uint8).data for each in arrays])
            except ValueError:
                raise
            except BaseException:  # also of a signal: what comes next would be the answer to this prompt
                self._end()
                raise

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _ask(self, child: FileChild, head: bytes, arrays: list[memoryview]) -> ProcessedPrompt:
        seconds = self._timeout + (0.0 if child.num_orders else STARTING)
        line = child.ask(ProcessOrder(len(head)), (head, *arrays), seconds)
        if line is None:
            logger.error("the process that makes media ready for the model ended: %s", child.end())
            self._end()
            raise ValueError(_ENDED)
        answer = msgspec.json.decode(line, type=ProcessAnswer)
        if answer.failed:
            raise RuntimeError(answer.error)
        if answer.error:
            raise ValueError(answer.error)
        data = child.result(answer.size)
        if data is None:
            raise RuntimeError("the process that makes media ready for the model gave fewer bytes than it says")
        return decode_prompt(data)

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

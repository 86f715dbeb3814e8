"""Processor of a served model's images, video and audio, in a process of its own that its first use starts."""

from collections.abc import Callable

from quintet.engine.processes.model_info import ModelInfo
from quintet.media.items import MediaProcessor
from quintet.media.processes.client import ProcessorProcess


class ServedProcessor:
    """Backend.media_processor."""

    def __init__(self, model_info: Callable[[], ModelInfo]) -> None:
        """`model_info`: of the model once it is loaded; raises until then."""
        self._model_info = model_info
        self._process: ProcessorProcess | None = None

    def __call__(self) -> MediaProcessor:
        """Returns the processor. ValueError says why there is none."""
        info = self._model_info()
        if info.media_model is None:
            raise ValueError(info.no_media or "this model takes text alone")
        if self._process is None:
            self._process = ProcessorProcess(info.media_model)
        return self._process

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()

"""Images, video and audio of requests: fetched and decoded in threads of their own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quintet.media.errors import MediaPackageMissing
from quintet.media.input import MediaInput
from quintet.server.backend import Backend, EngineDead
from quintet.server.config import BodyBytes, ServerConfig
from quintet.server.http.errors import ApiError

THREADS = 4  # requests whose media are fetched, decoded or made ready at once; others wait


class MediaCalls:
    """The way in of media, of one API process."""

    def __init__(self, backend: Backend, settings: ServerConfig) -> None:
        self._backend, self._settings = backend, settings
        self._input: MediaInput | None = None
        self._threads: ThreadPoolExecutor | None = None

    @property
    def taken(self) -> bool:
        """True if the model takes images, video or audio; False while it is not known."""
        try:
            return bool(self._backend.model_info.media.kinds)
        except EngineDead:
            return False

    def body_limit(self, path: str) -> BodyBytes:
        """Returns the limit of requests to a path: more for chats, where the model takes images, video or audio."""
        return self._settings.body_limit(path, media=self.taken)

    @property
    def input(self) -> MediaInput | None:
        """Returns what makes prompts with media ready; None for a model that takes text alone."""
        info = self._backend.model_info.media
        if not info.kinds:
            return None
        if self._input is None:
            self._input = MediaInput(info, self._backend.media_processor)
        return self._input

    async def run(self, work: Callable[[], Any]) -> Any:
        """Runs work that waits for hosts and decoders. ApiError 501 if a package is missing."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "quintet-media")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except MediaPackageMissing as error:
            raise ApiError(501, f"{error.where or 'a part'}: {error}", code="not_installed") from None

    def close(self) -> None:
        """Ends threads and processes; work that runs ends by its own limits."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._input is not None:
            self._input.close()

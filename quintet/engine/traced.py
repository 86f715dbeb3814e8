"""Traces as an LLM offers them."""

from quintet.engine.shared import Shared


class Traced:
    """What has an engine that many threads share, and lets its caller have traces."""

    _shared: Shared

    def start_profile(self) -> None:
        """Begins a trace of the engine's steps and kernels, as profiler_config allows and bounds it.

        ValueError if it does not allow traces, or if one runs. What is generated is the same to the bit; it takes
        longer, so that times in a trace are to be compared with one another.
        """
        self._shared.call(self._shared.client.engine.profiler.start)

    def stop_profile(self) -> str:
        """Ends the trace -> its file, in profiler_config.torch_profiler_dir: for ui.perfetto.dev or chrome://tracing.

        A trace that reached a bound has ended before: then its file. ValueError if there is none; OSError if it
        cannot be written.
        """
        return str(self._shared.call(self._shared.client.engine.profiler.stop).path)

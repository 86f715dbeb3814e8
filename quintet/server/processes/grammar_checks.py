"""Checks grammars of structured output in an API process: the engine compiles only grammars that passed."""

import asyncio

from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.structured_output.compile_cache import CompileCache, CompileTimeout
from quintet.structured_output.compile_check import CompileChecker
from quintet.structured_output.grammar import SECONDS, TIMEOUT_MESSAGE
from quintet.structured_output.grammar_source import GrammarWriter, grammar_after, grammar_text
from quintet.tokenizers.tokenizer import Tokenizer


class GrammarChecks(GrammarWriter):
    """Compiles grammars on trial, and remembers the results."""

    def __init__(
        self, config: StructuredOutputsConfig, tokenizer: Tokenizer | None = None, seconds: float = SECONDS
    ) -> None:
        super().__init__(config, tokenizer)
        self._seconds = seconds
        self._trials = CompileChecker()
        self._tried = CompileCache(self._trials.compile_error, seconds)

    async def grammar(self, wanted: StructuredOutputsParams) -> str:
        """It as a grammar that compiles. ParameterError says why it does not, or not in time."""
        return await self._compiles(await asyncio.to_thread(grammar_text, wanted, self.config, self.tokenizer))

    async def grammar_after(self, grammar: str, before: str) -> str:
        """As GrammarWriter.grammar_after(), for a grammar that compiles; ParameterError as above."""
        return await self._compiles(await asyncio.to_thread(grammar_after, grammar, before))

    async def _compiles(self, text: str) -> str:
        trial = asyncio.wrap_future(self._tried(text))
        trial.add_done_callback(lambda done: done.exception())  # also after the last waiter has gone
        await asyncio.wait([trial], timeout=self._seconds)  # others may wait for the same: it is not cancelled
        if not trial.done() or isinstance(trial.exception(), CompileTimeout):
            raise ParameterError("structured_outputs", f"cannot be served: {TIMEOUT_MESSAGE}")
        if why := trial.result():
            raise ParameterError("structured_outputs", f"cannot be served: {why}")
        return text

    def close(self) -> None:
        self._tried.close()
        self._trials.close()

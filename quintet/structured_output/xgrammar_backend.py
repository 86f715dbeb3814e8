"""xgrammar as a backend of structured output: compiles in a process of its own, masks are filled here."""

import contextlib
import ctypes
import importlib.util
import json
import select
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from quintet.common.distribution import install_hint
from quintet.common.processes import Child
from quintet.structured_output.compile_check import TOO_MUCH
from quintet.structured_output.vocabulary import ByteVocabulary
from quintet.structured_output.xgrammar_worker import READY

TIMEOUT = 30.0  # seconds for one grammar, of which it may take xgrammar_worker.SECONDS of a processor
START_TIMEOUT = 60.0  # seconds until the process has the library and the vocabulary
MAX_ANSWER = 2**28  # bytes of one answer; what is longer is none
NO_START = "xgrammar does not start ({}); reinstall it ({}), or use the backend guidance"


def check_installed() -> None:
    """ValueError where the library is not installed."""
    for module, package in (("xgrammar", "xgrammar"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            needs = f"the backend xgrammar needs the package {package}, which is not here"
            raise ValueError(f"{needs}: {install_hint('xgrammar')}")


class XGrammarCompiler:
    """Compiles grammars for one vocabulary. Used from any thread."""

    def __init__(self, vocabulary: ByteVocabulary, eos_ids: Sequence[int]) -> None:
        import xgrammar as library  # some seconds

        special = frozenset(vocabulary.special_token_ids)
        texts = [b"" if token_id in special else piece for token_id, piece in enumerate(vocabulary.tokens)]
        self._library, self._size = library, len(texts)
        self._info = library.TokenizerInfo(
            texts, library.VocabType.RAW, vocab_size=len(texts), stop_token_ids=list(eos_ids)
        )
        self._lock = threading.Lock()  # of the process
        self._child: Child | None = None
        self._is_ready = False  # whether it has the library and the vocabulary
        self.compile(["regex", "a", {}])  # loads the library there

    def compile(self, source: Sequence[Any]) -> "XGrammarState":
        """Compiles [kind, source, options]. ValueError says what is wrong with it."""
        with self._lock:
            answer = self._answer(json.dumps(source))
        if answer is None:
            raise ValueError(TOO_MUCH)
        if answer[0] == "-":
            raise ValueError(answer[1:])
        compiled = self._library.CompiledGrammar.deserialize_json(answer[1:], self._info)
        return XGrammarState(self._library.GrammarMatcher(compiled), self._size, compiled.memory_size_bytes)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _answer(self, text: str) -> str | None:
        """Returns the answer of the process; None if it did not live to give one, or not in time. ValueError if it does
        not start."""
        if self._child is None:
            self._start()
        if not self._is_ready:
            if (said := self._read(START_TIMEOUT)) != READY:
                self._end()
                raise ValueError(NO_START.format((said or "-its process ended")[1:], install_hint("xgrammar")))
            self._is_ready = True
        answer = self._read(TIMEOUT) if self._send(text) else None
        if not answer:
            self._end()
            self._start()  # it loads while no request waits for it
        return answer or None

    def _start(self) -> None:
        self._child = Child(
            "quintet.structured_output.xgrammar_worker", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._is_ready = False
        self._send(self._info.serialize_json())

    def _read(self, seconds: float) -> str | None:
        """Returns what the process writes next; None if that does not come in time, or not whole."""
        assert self._child is not None
        answers, waiting = self._child.stdout, select.poll()
        waiting.register(answers, select.POLLIN)
        if not waiting.poll(seconds * 1000):
            return None
        head = answers.read(4)
        size = int.from_bytes(head, "big")
        data = answers.read(size) if len(head) == 4 and size <= MAX_ANSWER else b""
        return data.decode() if data and len(data) == size else None

    def _send(self, text: str) -> bool:
        data = text.encode()
        return self._child is not None and self._child.tell(len(data).to_bytes(4, "big") + data)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()
            child.close()


class XGrammarState:
    """Position of an output in a grammar, with the methods of llguidance's matcher that Matcher calls."""

    def __init__(self, matcher: Any, size: int, num_bytes: int) -> None:
        """`size`: tokens of the vocabulary; `num_bytes`: memory of the grammar."""
        self._matcher, self._size, self.num_bytes = matcher, size, num_bytes
        self._refused = 0  # last tokens of the output: the first that the grammar refused, and all after it
        self._after = 0  # last tokens of the output, which came when it had ended

    def deep_copy(self) -> "XGrammarState":
        """Returns another at the same position."""
        copied = XGrammarState(self._matcher.fork(), self._size, self.num_bytes)
        copied._refused, copied._after = self._refused, self._after
        return copied

    def is_stopped(self) -> bool:
        """True if the output has ended, or only end-of-text may follow."""
        if self._matcher.is_terminated():
            return True
        if self._refused or not self._matcher.is_completed():
            return False
        stops = set(self._matcher.stop_token_ids)
        return all(token_id in stops for token_id in self._allowed())

    def is_error(self) -> bool:
        return self._refused > 0

    def get_error(self) -> str:
        """Returns why the output cannot go on."""
        return "the output has a token that the grammar does not take" if self._refused else ""

    def consume_tokens(self, token_ids: Sequence[int]) -> bool:
        """Takes tokens; False once one was refused."""
        for token_id in token_ids:
            if self._matcher.is_terminated():
                self._after += 1
            elif self._refused or not self._matcher.accept_token(token_id):
                self._refused += 1
        return not self._refused

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        """Takes tokens up to the first that may not come -> how many."""
        for taken, token_id in enumerate(token_ids):
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                return taken
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens back."""
        refused, after = min(num_tokens, self._refused), min(num_tokens, self._after)  # one of them is 0
        self._refused, self._after = self._refused - refused, self._after - after
        if (taken := num_tokens - refused - after) > 0:
            self._matcher.rollback(taken)

    def compute_ff_tokens(self) -> list[int]:
        """Returns no forced tokens: the library's are not the tokenizer's own."""
        return []

    def compute_bitmask(self) -> bytes:
        """Returns a bit for each token that may come next."""
        return bytes(self._mask().tobytes())

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        """Writes these bits to memory."""
        data = self.compute_bitmask()[:num_bytes]
        ctypes.memset(address, 0, num_bytes)
        ctypes.memmove(address, data, len(data))

    def _mask(self) -> Any:
        import numpy as np  # processes that only admit requests need none

        words = np.zeros((1, -(-self._size // 32)), np.int32)
        self._matcher.fill_next_token_bitmask(words)
        return words

    def _allowed(self) -> list[int]:
        import numpy as np

        bits = np.unpackbits(self._mask().view(np.uint8), bitorder="little")
        return [int(each) for each in np.flatnonzero(bits)]

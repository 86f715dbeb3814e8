"""One request as the engine core sees it: token ids in, token ids out. Text is somebody else's."""

import enum
import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quintet.sampling_params import SamplingParams

if TYPE_CHECKING:  # a process that only admits requests needs no torch
    from quintet.engine.grammar import Matcher
    from quintet.engine.tables import Found
    from quintet.types import Array


UNKNOWN = -1  # in the place of a token that a running step samples


class FinishReason(str, enum.Enum):
    """Why a request ended; the value is what the API shows."""

    STOP = "stop"  # an end-of-text token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # a failure inside this request


@dataclass(eq=False, slots=True)
class Request:
    """State of one completion. The scheduler moves num_computed and the pages; finish() appends the tokens.

    0 <= num_cached <= num_computed <= len(token_ids). A request whose num_computed is len(token_ids) - 1 decodes.

    Where steps are planned while others run, the last tokens may be UNKNOWN: that they are there is all that a plan
    needs. finish() writes them in when the step that samples them has landed.
    """

    request_id: str
    token_ids: list[int]  # the prompt, then the output; at its end, num_unknown times UNKNOWN
    params: SamplingParams
    num_prompt: int
    key: tuple[int, int]  # of its random numbers, two int32
    max_tokens: int  # resolved: never beyond the model's length
    stop_ids: frozenset[int] = frozenset()  # every token that ends it, end-of-text included unless ignored
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    salt: bytes = b""  # keeps tenants' prefix caches apart
    priority: int = 0  # lower runs first
    arrival: float = field(default_factory=time.monotonic)
    order: int = 0  # of admission: settles ties

    grammar: "Matcher | None" = None  # where its output stands in what it must look like
    num_unknown: int = 0  # tokens that running steps sample
    num_computed: int = 0  # tokens whose K and V are in the cache, or will be when the running steps have landed
    num_cached: int = 0  # of the prompt, found in the prefix cache when it was first scheduled
    pages: list[list[int]] = field(default_factory=list)  # by group of layers; empty while it waits
    rows: "list[Array | None]" = field(default_factory=list)  # pages as the batch wants them, None where they changed
    trimmed: list[int] = field(default_factory=list)  # pages of each group that were given back behind its window
    found: "Found | None" = None  # of its beginning in the prefix cache, while it waits
    page_hashes: list[bytes] = field(default_factory=list)  # one per full page of token_ids, computed as needed
    generation: int = 0  # of the prefix cache that they are for
    num_committed: int = 0  # pages that stand in the prefix cache under their hash
    num_preemptions: int = 0
    num_scored: int = 0  # positions of the prompt whose log-probabilities were given out, or are not wanted
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or the string that ended it

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def looks_back(self) -> bool:
        """Whether its next token is drawn by what the tokens before it are, and not by their number alone."""
        p = self.params
        penalized = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        return penalized or any(len(word) > 1 for word in self.bad_words_ids) or p.structured_outputs is not None

    @property
    def ready(self) -> bool:
        """Whether it may be scheduled: its grammar, if it has one, is compiled."""
        return self.grammar is None or self.grammar.ready

    def expect(self) -> None:
        """A step was started that samples its next token."""
        self.token_ids.append(UNKNOWN)
        self.num_unknown += 1

    def forget_unknown(self) -> None:
        """The running steps will not land: what they would have sampled is sampled again."""
        while self.num_unknown or self.token_ids[-1] == UNKNOWN:  # Ctrl-C may have come between the two
            self.token_ids.pop()
            self.num_unknown = max(0, self.num_unknown - 1)

    @property
    def wants_scores(self) -> bool:
        """Whether prompt log-probabilities are still to be given out; the last position of a prompt has none."""
        return self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    def scored(self, start: int, count: int) -> range:
        """Positions, among `count` tokens from `start` on, whose log-probabilities are to be given out.

        A preempted request gave out the first of them before; the last token of a prompt has none.
        """
        if not self.wants_scores:
            return range(0)
        return range(max(start, self.num_scored), min(start + count, self.num_prompt - 1))

    def num_rows(self, start: int, count: int) -> int:
        """Rows of logits that `count` tokens from `start` on need: one if it samples, one for each score."""
        return len(self.scored(start, count)) + (start + count == len(self.token_ids))

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


def random_key(seed: int | str, index: int) -> tuple[int, int]:
    """Two int32 from a seed of any size or form and the number of the completion among its n."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)

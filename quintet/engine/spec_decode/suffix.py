"""Suffix decoding (Oliaro 2024; vLLM's "suffix"): drafts from a request's own text, and from outputs of past requests.

Past outputs are found by requests with the same cache salt only: what one tenant was answered neither shows in the
drafts of another nor in their timing. Outputs enter when their requests end; memory is bounded.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from quintet.config import SpeculativeConfig
from quintet.engine.request import Request
from quintet.engine.spec_decode.ngram import TokenHistory
from quintet.engine.spec_decode.proposer import Proposer
from quintet.engine.spec_decode.suffix_index import MAX_POSITION, Draft, SuffixIndex, make_suffix_index
from quintet.interface.types import IntArray

MAX_PAST_TOKENS = 2**22  # of past outputs: 104 MiB, if so many are ever there
MIN_TEXT_TOKENS = 512  # of a request's own text; its index doubles as it grows


@dataclass
class Tenant:
    """Requests with one cache salt."""

    owner: int  # number of its texts; never given to another
    num_texts: int = 0


class PastOutputs:
    """The newest outputs of requests that have ended, up to a number of requests and of tokens."""

    def __init__(self, max_requests: int, max_tokens: int = MAX_PAST_TOKENS) -> None:
        self._max_requests, self._capacity = max_requests, max_tokens
        self._index = make_suffix_index(max_tokens)
        self._tenants: dict[bytes, Tenant] = {}
        self._texts: deque[tuple[bytes, int]] = deque()  # salt, and position of its end
        self._num_owners = 0

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def add(self, salt: bytes, ids: IntArray) -> None:
        """Adds an output [T] int32; of one that is longer than half of the memory, its end."""
        ids = ids[-(self._capacity // 2) :]
        if not len(ids):
            return
        if self._index.position + len(ids) + 1 >= MAX_POSITION:
            self._index = make_suffix_index(self._capacity)
            self._tenants.clear()
            self._texts.clear()
        if salt not in self._tenants:
            self._num_owners += 1
            self._tenants[salt] = Tenant(self._num_owners % 2**32)
        tenant = self._tenants[salt]
        tenant.num_texts += 1
        self._index.append(ids, tenant.owner, ends=True)
        self._texts.append((salt, self._index.position))
        while len(self._texts) > self._max_requests or self._texts[0][1] <= self._index.position - self._capacity:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        salt, end = self._texts.popleft()
        self._index.forget_before(end)
        self._tenants[salt].num_texts -= 1
        if not self._tenants[salt].num_texts:
            del self._tenants[salt]

    def lookup(self, salt: bytes, ids: IntArray, most: int, factor: float, share: float, depth: int) -> Draft:
        tenant = self._tenants.get(salt)
        return ([], 0.0, 0) if tenant is None else self._index.lookup(ids, tenant.owner, most, factor, share, depth)


@dataclass
class OwnText:
    """The known tokens of one request, and the last draft."""

    index: SuffixIndex = field(default_factory=lambda: make_suffix_index(MIN_TEXT_TOKENS))
    capacity: int = MIN_TEXT_TOKENS
    num_drafted: int = 0  # known tokens that `draft` follows
    draft: list[int] = field(default_factory=list)

    def append_to(self, ids: IntArray) -> None:
        """Appends what the index lacks of ids [T]."""
        if len(ids) > self.capacity:
            while len(ids) > self.capacity:
                self.capacity *= 2
            self.index = make_suffix_index(self.capacity)
        if self.index.position < len(ids):
            self.index.append(ids[self.index.position :], 0, ends=False)


class SuffixProposer(Proposer):
    """Proposes, of the drafts from both sources, the one with more tokens that are expected to be right."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.num_drafts = config.num_speculative_tokens
        self._depth: Final = config.suffix_decoding_max_tree_depth
        self._factor, self._share = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        max_requests = config.suffix_decoding_max_cached_requests
        self.past: Final = PastOutputs(max_requests) if max_requests else None
        self._texts: dict[Request, OwnText] = {}

    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        for request, most in room:
            request.draft_tokens = self._draft(request)[:most]

    def may_propose(self, requests: Sequence[Request]) -> bool:
        return any(map(self._draft, requests))

    def finish(self, request: Request) -> None:
        self._texts.pop(request, None)
        if self.past is not None and request.core_request.pooling is None:
            self.past.add(request.core_request.salt, _history_of(request).token_ids_of(request)[request.num_prompt :])

    def _draft(self, request: Request) -> list[int]:
        """Returns draft tokens after the known ones; looks them up once for each number of these."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = OwnText()
        if text.num_drafted != request.num_known:
            ids = _history_of(request).token_ids_of(request)
            text.append_to(ids)
            how = self.num_drafts, self._factor, self._share, self._depth
            draft = text.index.lookup(ids, 0, *how)
            if self.past is not None:
                past = self.past.lookup(request.core_request.salt, ids, *how)
                draft = past if past[1] > draft[1] else draft
            text.draft, text.num_drafted = draft[0], request.num_known
        return text.draft


def _history_of(request: Request) -> TokenHistory:
    if request.history is None:
        request.history = TokenHistory()
    return request.history

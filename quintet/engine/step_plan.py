"""Plan of one step: how many tokens each request computes, and the limits that the scheduler keeps."""

from dataclasses import dataclass, field

from quintet.engine.request import Request
from quintet.engine.row_store.items import RowWrite

CachedPage = tuple[int, bytes]  # a page, and the hash under which it was entered into the prefix cache


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_logit_rows: int  # tokens that logits are computed for
    chunked_prefill: bool = True
    by_priority: bool = False
    # a prompt with more tokens is long, and a step computes so many of it at most; 0: none is
    long_prefill_threshold: int = 0
    max_partial_prefills: int | None = None  # prompts that are partly computed after a step
    max_long_prefills: int | None = None  # of which are long
    # steps that run one behind the other, in stages: each takes its part of the requests that decode
    num_stages: int = 1
    prefill_tokens_beside_decode: int = 0  # of prompts, in a step in which as many requests decode; 0: no limit

    def is_long(self, request: Request) -> bool:
        return 0 < self.long_prefill_threshold < request.num_prompt

    def prompt_tokens_beside(self, decodes: int, prompts: int) -> int:
        """Returns how many tokens of so many prompts a step computes where so many requests decode: few, so that
        streams do not wait for a prompt; but where prompts are more, it is they that wait."""
        if not self.prefill_tokens_beside_decode or decodes < max(1, prompts):
            return self.max_num_batched_tokens
        return max(self.prefill_tokens_beside_decode, 2 * decodes)


@dataclass
class StepPlan:
    """One step: how many tokens each request computes, in the order of the batch."""

    tokens: dict[Request, int] = field(default_factory=dict)
    cached_pages: dict[Request, list[int]] = field(default_factory=dict)  # pages that entered the prefix cache for it
    new_cached_pages: list[CachedPage] = field(default_factory=list)  # the same with their hashes, for the KV connector
    # requests that fill a page with a token that is not known yet
    late_commits: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    row_writes: dict[bytes, RowWrite] = field(default_factory=dict)  # items of the row store that it writes first
    num_tokens: int = 0
    num_prompt_tokens: int = 0  # of them; counted when the step was started
    num_rows: int = 0  # of logits: of requests that sample, of their drafts, and of prompt tokens that are scored
    num_drafts: int = 0  # tokens that were guessed

    def __bool__(self) -> bool:
        return bool(self.tokens)

    @property
    def counts(self) -> dict[str, int]:
        """Counts for a trace."""
        return {
            "requests": len(self.tokens),
            "tokens": self.num_tokens,
            "rows": self.num_rows,
            "drafts": self.num_drafts,
        }

    def schedule(self, request: Request, count: int) -> None:
        self.tokens[request] = count
        self.num_tokens += count
        self.num_rows += request.num_rows(request.num_computed, count)
        self.num_drafts += request.num_drafts

    def drop(self, request: Request) -> None:
        """Takes out a request, whether it is there or not."""
        count = self.tokens.pop(request, 0)
        self.num_tokens -= count
        self.num_rows -= request.num_rows(request.num_computed, count) if count else 0
        self.num_drafts -= request.num_drafts if count else 0

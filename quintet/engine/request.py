"""One request as the engine core sees it: token ids in, token ids out. Its text is output_processor.py's."""

import enum
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quintet.chat.reasoning_tokens import NOT_REASONING, ReasoningMarkerIds
from quintet.engine.kv_transfer_params import TransferParams, transfer_params_of
from quintet.lora.request import LoRAReference
from quintet.media.items import MediaItem
from quintet.media.spans import identity
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.transcription.alignment import AlignmentSpan

if TYPE_CHECKING:  # a process that only admits requests needs no torch
    from quintet.engine.encoder.cache import EncodedPages
    from quintet.engine.kv_cache.manager import PrefixMatch
    from quintet.engine.lora.loaded import LoadedLoRA
    from quintet.engine.media.rotary import RequestRotary
    from quintet.engine.pooling.pooler import PooledRows
    from quintet.engine.repetition_detection import RepetitionDetector
    from quintet.engine.row_store.items import PromptRows
    from quintet.engine.spec_decode.draft_model import DraftProgress
    from quintet.engine.spec_decode.ngram import TokenHistory
    from quintet.interface.types import IntArray
    from quintet.structured_output.grammar import Matcher


FIRST_TOKEN, LAST_TOKEN, EACH_TOKEN = "first", "last", "each"  # of the tokens of a text
PLACEHOLDER = -1  # in the place of a token that a running step samples


class FinishReason(str, enum.Enum):
    """Why a request ended; the value is what the API shows."""

    STOP = "stop"  # an end-of-text token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    REPETITION = "repetition"  # it goes in circles, and the caller asked to end it then
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # a failure inside this request


@dataclass(frozen=True)
class CoreRequest:
    """One completion as admission made it: the facts of a request, which never change. Encodes with msgspec."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    random_key: tuple[int, int]  # of its random numbers, two int32
    max_tokens: int  # resolved: never beyond the model's length
    stop_ids: frozenset[int] = frozenset()  # every token that ends it, end-of-text included unless ignored
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    salt: bytes = b""  # keeps tenants' prefix caches apart
    priority: int = 0  # lower runs first
    arrival: float = field(default_factory=time.monotonic)  # all processes of a machine share this clock
    returns_prompt_logprobs: bool = True  # whether prompt log-probabilities are read from it, if any are asked for
    embeds: bytes = b""  # float32, a row for each of prompt_ids, which then only hold their places
    grammar: str = ""  # what its output must look like, as grammar_text.py writes it; "": anything
    reasoning_marker_ids: ReasoningMarkerIds | None = None  # of its thoughts, where thinking_token_budget bounds them
    open_reasoning_tokens: int = NOT_REASONING  # tokens of one that the prompt has begun
    pooling: PoolingParams | None = None  # what numbers are wanted of it; None: text
    pooled_rows: str = ""  # tokens that are pooled: FIRST, LAST or EACH (all)
    token_types: bytes = b""  # int32, the segment of each of prompt_ids; none: all are of segment 0
    lora: LoRAReference | None = None  # the adapter that it is answered with
    encoder: MediaItem | None = None  # what the model's encoder makes rows of, which its layers read; in the salt, too
    media: tuple[MediaItem, ...] = ()  # pictures and the like, in the order of their tokens in prompt_ids
    alignment: AlignmentSpan | None = None  # attention of its tokens to `encoder` that is asked for
    sees_prompt: bool = False  # each token of the prompt sees all of it; in the salt, too

    @property
    def has_rows(self) -> bool:
        """True if rows of the row store stand in the places of some tokens."""
        return bool(self.embeds or self.media)

    def beside_tokens(self, start: int, stop: int) -> bytes | memoryview:
        """Returns what tells the tokens start .. stop - 1 from the same ids in other prompts: what stands in their
        places."""
        return identity(self.media, start, stop) if self.media else self.embeds_of(start, stop)

    def embeds_of(self, start: int, stop: int) -> memoryview:
        """Returns the embeddings in the places of tokens start .. stop - 1."""
        row = len(self.embeds) // len(self.prompt_ids)  # bytes
        return memoryview(self.embeds)[row * start : row * stop]

    def pooled_positions(self, start: int, count: int) -> range:
        """Positions of the tokens that are pooled, among `count` tokens from `start` on."""
        last = len(self.prompt_ids) - 1
        wanted = {FIRST_TOKEN: 0, LAST_TOKEN: last}.get(self.pooled_rows)
        if wanted is None:
            return range(start, start + count)
        return range(wanted, wanted + 1) if start <= wanted < start + count else range(start, start)


@dataclass(slots=True)
class StateSlots:
    """Slots of a request's states, in a model that has some; 0: none. Only Slots changes them (see state_slots.py)."""

    state: int = 0  # after num_state tokens: all that are computed, but for drafts that the slot keeps apart
    next_state: int = 0  # that the planned step writes
    previous: int = 0  # that the step before read, while its drafts are checked
    num_state: int = 0
    num_previous: int = 0
    branch_tokens: int = 0  # tokens that others have begun with: a state after them is worth keeping
    last_hash: bytes = b""  # the hash under which a state of its output was kept last

    @property
    def held(self) -> list[int]:
        return [slot for slot in (self.state, self.next_state, self.previous) if slot]


@dataclass(eq=False, slots=True)
class Request:
    """State of one completion.

    Its tokens lie in stretches, and each border is moved from few places:

        token_ids  |  prompt  |  output that has landed  |  PLACEHOLDERs, which running steps draw, or num_drafts drafts
        0      num_prompt                num_known                                                    len(token_ids)
                                         take()          expect() or guess() append; take() and forget_unknown() remove

    While no step runs, at least the last known token is left to compute; with one left, a request decodes:

        0 <= num_cached <= num_computed < num_known == len(token_ids)
             found in the prefix cache when it first ran
                           KVCacheManager.hold(): found there; Scheduler.advance(): a step computes them;
                           settle(): drafts were refused

    A step that is planned while another runs computes tokens that are not known yet: num_computed <= len(token_ids). A
    preempted request waits with num_computed == 0, and its num_cached stays.
    """

    core_request: CoreRequest
    order: int = 0  # of admission: settles ties
    params: SamplingParams = field(init=False)  # admitted.params: every step looks there
    transfer_params: TransferParams | None = field(init=False)  # its pages, and another engine
    num_prompt: int = field(init=False)
    token_ids: list[int] = field(init=False)
    num_known: int = field(init=False)
    num_drafts: int = 0  # tokens at the end that were guessed, and are drawn by the step that computes them
    draft_tokens: list[int] = field(default_factory=list)  # of a proposer, for the step that is planned next
    num_computed: int = 0  # tokens with K and V in the cache, or there when the running steps have landed
    num_cached: int = 0  # of the prompt, found in the prefix cache when it was first scheduled
    pages: list[list[int]] = field(default_factory=list)  # by group of layers; empty while it waits
    table_rows: "list[IntArray | None]" = field(
        default_factory=list
    )  # pages as the batch wants them, None where they changed
    trimmed: list[int] = field(default_factory=list)  # pages of each group that were given back behind its window
    state_slots: StateSlots = field(default_factory=StateSlots)  # of its state
    prefix_match: "PrefixMatch | None" = None  # of its beginning in the prefix cache, while it waits
    asked_connector: bool = False  # whether the KV connector was asked for pages since it was last queued
    num_fetched: int = 0  # tokens of its beginning that the KV connector loaded since then
    num_available: int = 0  # tokens that were cached when they had come
    page_hashes: list[bytes] = field(default_factory=list)  # one per full page of token_ids, computed as needed
    generation: int = 0  # of the prefix cache that they are for
    num_committed: int = 0  # pages that stand in the prefix cache under their hash
    num_preemptions: int = 0
    scheduled_at: float | None = None  # time.monotonic() when its first step was planned
    num_scored: int = 0  # positions of the prompt whose log-probabilities were returned, or are not wanted
    num_routed: int = 0  # of its tokens, whose experts were returned, or are not wanted
    prompt_rows: "PromptRows | None" = None  # of the row store, which stand in the places of its prompt's tokens
    encoded: "EncodedPages | None" = None  # of its media, while it runs; only EncoderCache changes it
    rotary: "RequestRotary | None" = None  # its tokens' rotary positions, where they are not their positions
    history: "TokenHistory | None" = None  # of the drafts
    repetition: "RepetitionDetector | None" = None  # of its output, if the caller asked for it
    grammar: "Matcher | None" = None  # where its output stands in what it must look like
    lora: "LoadedLoRA | None" = None  # its adapter
    draft_progress: "DraftProgress | None" = None  # what a draft model has computed of it; None: nothing is known
    lora_slot: int = 0  # that this has on the device while it runs, from 1 on
    num_overtaken: int = 0  # requests with adapters that started before it, while it waited for a slot
    pooled_rows: "PooledRows | None" = None  # what steps have given of a text that becomes numbers

    def __post_init__(self) -> None:
        self.params, self.token_ids = self.core_request.params, list(self.core_request.prompt_ids)
        self.num_prompt = self.num_known = len(self.token_ids)
        self.num_scored = 0 if self.params.prompt_logprobs is not None else self.params.prompt_logprob_start
        self.num_routed = self.params.routed_experts_prompt_start
        self.transfer_params = None if self.core_request.pooling is not None else transfer_params_of(self.params)

    @property
    def request_id(self) -> str:
        return self.core_request.request_id

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_unknown(self) -> int:
        """Tokens that running steps draw, or that were guessed."""
        return len(self.token_ids) - self.num_known

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be drawn; those that running steps draw count as drawn."""
        return self.num_prompt + self.core_request.max_tokens - len(self.token_ids)

    @property
    def needs_previous_tokens(self) -> bool:
        """True if its next draw depends on the values of the tokens before it, and not on their number alone."""
        p = self.params
        penalized = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        facts = self.core_request  # with an encoder, timestamp rules may shape its tokens
        shaped = bool(facts.grammar) or facts.reasoning_marker_ids is not None or facts.encoder is not None
        return penalized or shaped or any(len(word) > 1 for word in facts.bad_words_ids)

    @property
    def ready(self) -> bool:
        """True if it may be scheduled: what it needs is there."""
        return (self.grammar is None or self.grammar.ready) and (self.lora is None or self.lora.ready)

    def reserve_sampled(self) -> None:
        """A step was started that draws its next token."""
        self.token_ids.append(PLACEHOLDER)

    def append_drafts(self, token_ids: Sequence[int]) -> None:
        """Appends draft tokens after all known ones: the next step computes them, too, and draws after each."""
        self.token_ids += token_ids
        self.num_drafts = len(token_ids)

    def pop_drafts(self) -> list[int]:
        """The step that drew after its drafts has landed: removes and returns them. take() what was drawn, and then
        settle()."""
        drafts = self.token_ids[self.num_known :] if self.num_drafts else []
        if drafts:
            self.drop_unknown()
        return drafts

    def drop_rejected(self) -> None:
        """Drops the computation of rejected drafts: the last token is left to compute."""
        self.num_computed = self.num_known - 1

    def append_sampled(self, token_id: int) -> FinishReason | None:
        """The first token that was not known has landed -> why the request ends with it; None: it goes on."""
        if self.num_known < len(self.token_ids):
            self.token_ids[self.num_known] = token_id
        else:
            self.token_ids.append(token_id)
        self.num_known += 1
        facts, enough = self.core_request, self.num_known - self.num_prompt >= self.params.min_tokens
        circles = self.repetition is not None and self.repetition.add(token_id)
        if token_id in facts.stop_ids and enough:
            return FinishReason.STOP
        if len(self.token_ids) == self.num_prompt + facts.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.REPETITION if circles and enough else None

    def drop_unknown(self) -> None:
        """The running steps will not land: what they would have drawn is drawn again. Nor are drafts kept."""
        del self.token_ids[self.num_known :]
        self.num_drafts, self.draft_tokens = 0, []

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if prompt log-probabilities are still to be returned; the last position of a prompt has none."""
        asked = self.params.scores_prompt and self.core_request.returns_prompt_logprobs
        return asked and self.num_scored < self.num_prompt - 1

    def scored_positions(self, start: int, count: int) -> range:
        """Positions, among `count` tokens from `start` on, that still need log-probabilities.

        A preempted request has returned the first of them before; the last token of a prompt has none.
        """
        if not self.wants_prompt_logprobs:
            return range(0)
        return range(max(start, self.num_scored), min(start + count, self.num_prompt - 1))

    def num_rows(self, start: int, count: int) -> int:
        """Rows of logits that `count` tokens from `start` on need: for each score; if it samples, for the next token
        and each draft, too."""
        if self.core_request.pooling is not None:
            return len(self.core_request.pooled_positions(start, count))
        drawn = 1 + self.num_drafts if start + count == len(self.token_ids) else 0
        return drawn + len(self.scored_positions(start, count)) if self.params.scores_prompt else drawn


def random_key(seed: int | str, index: int) -> tuple[int, int]:
    """Two int32 from a seed of any size or form and the number of the completion among its n."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)

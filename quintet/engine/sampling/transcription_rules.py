"""Rules of transcripts: tokens that are suppressed, and timestamps that come in pairs and never go back."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quintet.engine.request import Request
from quintet.engine.sampling.logits_edits import LogitEdit, TokenPlaces
from quintet.interface.platform import Device
from quintet.ops.registry import Ops
from quintet.transcription.rules import DecodingRules
from quintet.transcription.timestamps import apply_timestamp_rules


class TranscriptionRules(LogitEdit):
    """The model's rules for each request with audio: suppressed tokens first, then timestamps, as transformers."""

    def __init__(self, ops: Ops, device: Device, vocab_size: int, static: bool, rules: DecodingRules) -> None:
        super().__init__(ops, device, vocab_size, static)
        self._rules = rules

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        numbered = enumerate(requests)
        self._rows = [(row, request) for row, request in numbered if request.core_request.encoder is not None]
        self._timed = [
            (row, request)
            for row, request in self._rows
            if self._rules.has_timestamps(request.token_ids[: request.num_prompt])
        ]
        self._always = self._places([row for row, _ in self._rows], self._rules.suppress)
        return bool(self._rows)

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        first = [row for row, request in self._rows if positions[row] == request.num_prompt]
        for places in (*self._always, *self._places(first, self._rules.begin_suppress)):
            logits = self.ops.ban_tokens(logits, *places)
        if not self._timed or self._rules.tokens is None:
            return logits
        past = [request.token_ids[request.num_prompt : positions[row]] for row, request in self._timed]
        rows = [row for row, _ in self._timed]
        if self._static:  # such devices compute by ops alone
            return self._keep_by_host(logits, rows, past)
        if len(rows) == logits.shape[0]:
            return apply_timestamp_rules(logits, past, self._rules.tokens, self._rules.max_initial)
        logits[rows] = apply_timestamp_rules(logits[rows], past, self._rules.tokens, self._rules.max_initial)
        return logits

    def _keep_by_host(self, logits: Tensor, rows: Sequence[int], past: Sequence[Sequence[int]]) -> Tensor:
        """Applies the rules of timestamps to logits that the host has a copy of."""
        assert self._rules.tokens is not None, "there are rules"
        copy = self.device.to_host(logits)()[rows]
        kept = apply_timestamp_rules(copy, past, self._rules.tokens, self._rules.max_initial) > -math.inf
        bits = np.full((logits.shape[0], 4 * -(-self.vocab_size // 32)), 255, np.uint8)
        packed = np.packbits(kept.numpy(), axis=1, bitorder="little")
        bits[rows, : packed.shape[1]] = packed
        return self.ops.keep_tokens(logits, self.device.to_device([bits.view(np.int32)])[0])

    def _places(self, rows: Sequence[int], ids: Sequence[int]) -> list[TokenPlaces]:
        """Returns these tokens in each of these rows."""
        if not rows or not ids:
            return []
        return self.upload(np.repeat(np.array(rows, np.int32), len(ids)), np.tile(np.array(ids, np.int32), len(rows)))

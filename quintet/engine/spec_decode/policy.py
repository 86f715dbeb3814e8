"""Number of drafts in a step: weighs the chance that the next one is accepted against what one more token costs.

Acceptance is counted per request; costs come as a table that one rank has measured, so that all ranks decide the same.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quintet.engine.request import Request

FloatArray = npt.NDArray[np.float64]
COST_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens of steps with a cost

PRIOR = 0.7  # acceptance of a place before anything is known
REQUEST_WEIGHT = 0.15  # of the newest draft in the acceptance of its request
ENGINE_WEIGHT = 0.01  # in that of all, with which requests begin
PROBE_STEPS = 64  # after so many steps without drafts, one has some: acceptance may have changed
PROBE_LOSS = 0.01  # share of the time that these may cost
PLAIN_STEPS = 32  # after so many steps with drafts, one has none: what it takes is what drafts are weighed against
LEAST_CHANCE = 0.2  # of a draft to be accepted, as long as costs are not known


PROBE_COST = 1 + PROBE_LOSS * PROBE_STEPS  # of a step that probes, over one without drafts


class DraftPolicy:
    """Acceptance of requests by the place of a draft, and the marginal rule."""

    def __init__(self, num_drafts: int) -> None:
        self._all = np.full(num_drafts, PRIOR)
        self._rates: dict[Request, FloatArray] = {}
        self._costs: FloatArray | None = None  # [COST_SIZES]
        self._draft_cost = 0.0  # seconds that the proposer takes for a draft
        self._num_skipped = 0  # steps in a row that were to have no drafts
        self._num_drafted = 0  # steps with drafts since the last without

    def set_costs(self, costs: Sequence[float]) -> None:
        """Sets the seconds that steps of COST_SIZES tokens take and, behind them, those of the proposer for a draft."""
        steps, rest = costs[: len(COST_SIZES)], costs[len(COST_SIZES) :]
        self._costs = np.maximum.accumulate(np.asarray(steps, np.float64))  # a larger step costs no less
        self._draft_cost = sum(rest)

    def add_result(self, request: Request, drafted: int, accepted: int) -> None:
        """Counts a verified draft: its first tokens were accepted, the next one was not, if there is one."""
        rates = self._rates.get(request)
        if rates is None:
            rates = self._rates[request] = self._all.copy()
        seen = min(accepted + 1, drafted, len(rates))  # what follows a rejected one is not known
        hits = np.arange(seen) < accepted
        rates[:seen] += REQUEST_WEIGHT * (hits - rates[:seen])
        self._all[:seen] += ENGINE_WEIGHT * (hits - self._all[:seen])

    def finish(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._rates.pop(request, None)

    @property
    def skips_next(self) -> bool:
        """True if the next step is to have no drafts, so that nothing need wait for its tokens."""
        return 0 < self._num_skipped < PROBE_STEPS

    def limit(self, room: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Returns `room` with as many drafts as are worth their costs, of a step that decodes these requests.

        The draft with the highest chance comes next, as long as its share of the tokens that are expected exceeds the
        share by which it makes the step slower."""
        if not any(most for _, most in room):
            self._num_skipped += self.skips_next
            return list(room)
        num_drafts = len(self._all)
        chances = np.cumprod([self._rates.get(request, self._all) for request, _ in room], axis=1)
        most = np.array([most for _, most in room])
        chances[np.arange(num_drafts) >= most[:, None]] = 0  # none is there
        order = np.argsort(-chances, axis=None, kind="stable")  # a place is never before the one ahead of it
        gains = chances.ravel()[order]
        costs = self._costs_of(len(room), len(gains))
        expected = len(room) + np.cumsum(gains) - gains  # before this one
        worth = gains > LEAST_CHANCE if costs is None else gains / expected > np.diff(costs) / costs[:-1]
        worth &= gains > 0
        count = len(worth) if worth.all() else int(np.argmin(worth))
        if count and self._num_drafted >= PLAIN_STEPS:
            self._num_drafted = 0
            return [(request, 0) for request, _ in room]
        if count == 0:
            self._num_skipped, self._num_drafted = self._num_skipped + 1, 0
            if self._num_skipped < PROBE_STEPS:
                return [(request, 0) for request, _ in room]
            count = len(room) if costs is None else int(np.searchsorted(costs, costs[0] * PROBE_COST, "right")) - 1
            count = min(max(1, count), int(np.count_nonzero(gains)))
        self._num_skipped, self._num_drafted = 0, self._num_drafted + 1
        counts = np.bincount(order[:count] // num_drafts, minlength=len(room))
        return [(request, int(count)) for (request, _), count in zip(room, counts, strict=True)]

    def _costs_of(self, requests: int, drafts: int) -> FloatArray | None:
        """Seconds of steps of these requests with 0, 1, ... so many drafts; None: not known yet."""
        if self._costs is None:
            return None
        counts = np.arange(drafts + 1)
        found: FloatArray = np.interp(requests + counts, COST_SIZES, self._costs) + self._draft_cost * counts
        return found

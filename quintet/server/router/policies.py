"""Who gets a request, among servers that could take it."""

import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import count

from quintet.server.router.asks import Ask
from quintet.server.router.backends import Backend

Policy = Callable[[Sequence[Backend], Ask], Backend]  # of at least one


def make_policy(name: str, ahead: int) -> Policy:
    """`ahead`: requests that a server may have more than the one with the fewest, and be chosen for what it knows."""
    made: dict[str, Callable[[], Policy]] = {
        "prefix": lambda: Prefix(ahead),
        "session": lambda: Session(ahead),
        "round_robin": RoundRobin,
        "least_loaded": lambda: least_loaded,
        "random": lambda: anyone,
        "power_of_two": lambda: power_of_two,
    }
    return made[name]()


def least_loaded(servers: Sequence[Backend], ask: Ask) -> Backend:
    """The one with the fewest requests from here; anyone of those that have as few."""
    least = min(each.in_flight for each in servers)
    return random.choice([each for each in servers if each.in_flight == least])


def anyone(servers: Sequence[Backend], ask: Ask) -> Backend:
    return random.choice(servers)


def power_of_two(servers: Sequence[Backend], ask: Ask) -> Backend:
    """Of two, the one with fewer. Source: Mitzenmacher, "The Power of Two Choices", 2001."""
    return min(random.sample(list(servers), min(2, len(servers))), key=lambda each: each.in_flight)


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._number = count()

    def __call__(self, servers: Sequence[Backend], ask: Ask) -> Backend:
        return servers[next(self._number) % len(servers)]


class Prefix:
    """The one that was given most of the prompt's beginning before, unless it has more to do than others."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    def __call__(self, servers: Sequence[Backend], ask: Ask) -> Backend:
        chain = ask.chain()
        near = _near(servers, self._ahead)
        found = [each.known.shared(chain) for each in near] if chain else [0] * len(near)
        most = max(found)
        best = least_loaded([each for each, shared in zip(near, found, strict=True) if shared == most], ask)
        best.known.remember(chain)
        return best


class Session:
    """The one that a session's name stands for, while it is there. Who comes or goes moves its own sessions alone.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998 (highest random weight).
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    def __call__(self, servers: Sequence[Backend], ask: Ask) -> Backend:
        if not ask.session:
            return least_loaded(servers, ask)
        return max(_near(servers, self._ahead), key=lambda each: _weight(each.url, ask.session))


def _near(servers: Sequence[Backend], ahead: int) -> list[Backend]:
    """Those that have little more to do than the one with the least."""
    least = min(each.in_flight for each in servers)
    most = least + max(ahead, least // 4)
    return [each for each in servers if each.in_flight <= most]


def _weight(url: str, session: str) -> bytes:
    """The same in every router and after every start."""
    return hashlib.blake2b(session.encode(), key=hashlib.sha256(url.encode()).digest(), digest_size=8).digest()

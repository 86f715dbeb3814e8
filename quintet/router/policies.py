"""Routing policies: the choice of a server among those that could take a request."""

import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import count

from quintet.router.backends import RouterBackend
from quintet.router.request_info import RequestInfo

Policy = Callable[[Sequence[RouterBackend], RequestInfo], RouterBackend]  # of at least one


def make_policy(name: str, ahead: int) -> Policy:
    """`ahead`: requests that a server may have more than the one with the fewest, and be chosen for what it knows."""
    made: dict[str, Callable[[], Policy]] = {
        "prefix": lambda: PrefixPolicy(ahead),
        "session": lambda: SessionPolicy(ahead),
        "round_robin": RoundRobinPolicy,
        "least_loaded": lambda: least_loaded,
        "random": lambda: random_backend,
        "power_of_two": lambda: power_of_two,
    }
    return made[name]()


def least_loaded(servers: Sequence[RouterBackend], ask: RequestInfo) -> RouterBackend:
    """Returns the server with the fewest requests from here; any of those that have as few."""
    least = min(each.in_flight for each in servers)
    return random.choice([each for each in servers if each.in_flight == least])


def random_backend(servers: Sequence[RouterBackend], ask: RequestInfo) -> RouterBackend:
    return random.choice(servers)


def power_of_two(servers: Sequence[RouterBackend], ask: RequestInfo) -> RouterBackend:
    """Returns the one with fewer requests, of two. Source: Mitzenmacher, "The Power of Two Choices", 2001."""
    return min(random.sample(list(servers), min(2, len(servers))), key=lambda each: each.in_flight)


class RoundRobinPolicy:
    """Takes one server after the other."""

    def __init__(self) -> None:
        self._number = count()

    def __call__(self, servers: Sequence[RouterBackend], ask: RequestInfo) -> RouterBackend:
        return servers[next(self._number) % len(servers)]


class PrefixPolicy:
    """Prefix affinity: the server that got most of the prompt before, unless it has more to do than others."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    def __call__(self, servers: Sequence[RouterBackend], ask: RequestInfo) -> RouterBackend:
        chain = ask.prefix_hashes()
        near = _within_threshold(servers, self._ahead)
        found = [each.prefixes.shared_length(chain) for each in near] if chain else [0] * len(near)
        most = max(found)
        best = least_loaded([each for each, shared in zip(near, found, strict=True) if shared == most], ask)
        best.prefixes.add(chain)
        return best


class SessionPolicy:
    """Session affinity: the server that a session's name hashes to. One that comes or goes moves its own sessions
    alone.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998 (highest random weight).
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    def __call__(self, servers: Sequence[RouterBackend], ask: RequestInfo) -> RouterBackend:
        if not ask.session:
            return least_loaded(servers, ask)
        return max(_within_threshold(servers, self._ahead), key=lambda each: _weight(each.url, ask.session))


def _within_threshold(servers: Sequence[RouterBackend], ahead: int) -> list[RouterBackend]:
    """Returns the servers that have little more to do than the one with the least."""
    least = min(each.in_flight for each in servers)
    most = least + max(ahead, least // 4)
    return [each for each in servers if each.in_flight <= most]


def _weight(url: str, session: str) -> bytes:
    """Returns the weight of a server for a session: the same in every router and after every start."""
    return hashlib.blake2b(session.encode(), key=hashlib.sha256(url.encode()).digest(), digest_size=8).digest()

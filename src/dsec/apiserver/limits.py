"""What one caller, and a stranger, may ask for in a second; how many connections there may be."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from dsec.core.errors import TooManyRequests

ADDRESSES: Final = 4096
"""Of strangers that are remembered; the one not seen for longest is forgotten first."""


class ApiLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one apiserver."""

    max_connections: int = 16_384
    """At once; one more is closed before anything is read from it."""
    requests_per_second: float = 5_000.0
    """Of one token. A burst of four seconds' worth is let through. 0: no limit."""
    refusals_per_second: float = 20.0
    """Requests with a wrong token from one address; past it 429, and no record. 0: no limit."""


class Bucket:
    """A token bucket: `rate` a second, `burst` at once."""

    __slots__ = ("_at", "_left", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._left, self._at = burst, now

    def take(self, now: float) -> bool:
        self._fill(now)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _fill(self, now: float) -> None:
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now


class Rates:
    """Raises TooManyRequests; a caller that waits a second may try again."""

    def __init__(self, limits: ApiLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._tokens: dict[str, Bucket] = {}
        self._strangers: OrderedDict[str, Bucket] = OrderedDict()

    def request(self, token_id: str) -> None:
        """By its token's id: tokens are few, so all are remembered."""
        rate = self._limits.requests_per_second
        if not rate:
            return
        bucket = self._tokens.get(token_id)
        if bucket is None:
            bucket = self._tokens[token_id] = Bucket(rate, 4 * rate, self._clock())
        if not bucket.take(self._clock()):
            raise TooManyRequests(f"more than {rate:g} requests a second with this token")

    def stranger(self, address: str) -> None:
        """A wrong token came from there."""
        rate = self._limits.refusals_per_second
        if not rate:
            return
        bucket = self._strangers.get(address)
        if bucket is None:
            bucket = self._strangers[address] = Bucket(rate, 5 * rate, self._clock())
            if len(self._strangers) > ADDRESSES:
                self._strangers.popitem(last=False)
        self._strangers.move_to_end(address)
        if not bucket.take(self._clock()):
            raise TooManyRequests("too many requests with a wrong token from this address")

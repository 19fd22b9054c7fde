"""When a request is sent again, and after which pause."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cofferdam.errors import CofferdamError, ServiceError, UnexpectedAnswer, Unreachable

# Refused before anything was done.
_REFUSED = 429
_LATER = (429, 502, 503)
_OF_PROXIES = (502, 503, 504)
_NOT_CONFIGURED = "SB001"


@dataclass(frozen=True)
class Retries:
    """At most `tries` requests, with pauses of at most `seconds` in total.

    If the answer's `Retry-After` is longer than the time left, its error is raised at once.
    """

    tries: int = 5
    seconds: float = 60.0

    def pause(
        self, error: CofferdamError, attempt: int, waited: float, *, is_repeatable: bool
    ) -> float | None:
        """Seconds until the request is sent again after this attempt (from 1); None for no retry.

        A request that is not repeatable is sent again only if it certainly had no effect.
        """
        if attempt >= self.tries or not _may_help(error, is_repeatable=is_repeatable):
            return None
        told = error.retry_after if isinstance(error, ServiceError) else None
        # Those who were refused together are not to come back together.
        wait = told if told is not None else min(2.0 ** (attempt - 1), 8) * random.uniform(0.5, 1)  # noqa: S311
        return wait if waited + wait <= self.seconds else None


NEVER = Retries(tries=1)


def _may_help(error: CofferdamError, *, is_repeatable: bool) -> bool:
    if isinstance(error, Unreachable):
        return is_repeatable or not error.sent
    if isinstance(error, UnexpectedAnswer):
        return is_repeatable and error.status in _OF_PROXIES
    if not isinstance(error, ServiceError) or error.ran or error.code == _NOT_CONFIGURED:
        return False
    return error.status == _REFUSED or (is_repeatable and error.status in _LATER)

"""A POST to an address that may be connected to, within a time that no answer can stretch.

What was checked is what is connected to, no redirect is followed, and of the answer's body only so
much is read as anybody needs: it is `fetching.exchange`, with problems told in our own words.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpcore
import httpx

from executions.services.fetching import exchange as fetching
from executions.services.fetching.budget import Budget
from executions.services.fetching.errors import FetchError, Reason
from providers.remote.receiver import Receiver

SECONDS = 15.0
_PAUSE_SECONDS = 10.0
# Of an answer's body; and of what may come with it.
MOST_BYTES = 16 * 1024
_RECEIVED_BYTES = 128 * 1024
_REFUSED = "the address is refused"
_NOT_CONNECTED = "it cannot be connected to, or its certificate is not accepted"
_PROBLEMS = {
    Reason.HOST: "the host was not found, or connections to it are not allowed",
    Reason.CONNECTION: _NOT_CONNECTED,
    Reason.CERTIFICATE: _NOT_CONNECTED,
    Reason.ANSWER: "the answer is cut short, or is not HTTP",
    Reason.TOO_SLOW: "there was no answer in time",
    Reason.TOO_LARGE: "the answer is too long",
}


@dataclass(frozen=True)
class Answer:
    """Why it was not taken, without the address, which may hold a secret; "" when it was."""

    problem: str
    body: bytes = b""


def post(url: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> str:
    """Why it was not taken; "" when it was, which the status says."""
    return exchange(url, body, headers, receiver, reads=False).problem


def exchange(
    url: str, body: bytes, headers: Mapping[str, str], receiver: Receiver, *, reads: bool = True
) -> Answer:
    """The same, with the beginning of the answer's body if it `reads` that."""
    try:
        target = httpx.URL(url)
        if not target.host:
            return Answer(_REFUSED)
        receiver.rules.check_url(str(target.copy_with(query=None, fragment=None)))
    except (ValueError, httpx.InvalidURL):
        return Answer(_REFUSED)
    budget = Budget(time.monotonic() + SECONDS, _PAUSE_SECONDS)
    try:
        with fetching.exchange(target, receiver, budget, "POST", headers, body) as answer:
            if not 200 <= answer.status < 300:
                return Answer(f"HTTP {answer.status}")
            budget.allow(_RECEIVED_BYTES)
            return Answer("", _beginning(answer) if reads else b"")
    except FetchError as error:
        return Answer(_PROBLEMS.get(error.reason, error.reason.value))


def _beginning(answer: httpcore.Response) -> bytes:
    found = b""
    for piece in answer.iter_stream():
        found += piece
        if len(found) >= MOST_BYTES:
            break
    return found[:MOST_BYTES]

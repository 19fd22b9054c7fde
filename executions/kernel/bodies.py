"""Bodies of requests in JSON: how much of it an endpoint takes, and where it is read.

A large one is read beside the requests of others: a few at once, and of one tenant never all.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from executions.kernel.background import Executor
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.json_reading import (
    MOST_VALUES,
    SMALL_BYTES,
    Bounds,
    CannotRead,
    Read,
    read_file,
    read_text,
)
from providers.json_values import TooMuch

# In the environment of a request: the future of what its body says, where that has been read, and
# what the server holds of it, which may grow (`Share`).
BODY, HELD = "cofferdam.body", "cofferdam.held"
# Of a request that has code, files or arguments, and of any other.
LARGE = Bounds(1 << 40, MOST_VALUES)
SMALL = Bounds(1024 * 1024, 10_000)
# Of a call of a tool over MCP, which the SDK reads once more, and checks, in this process.
CALL = Bounds(1 << 40, 20_000)
# Of a key that only reads, and of what an MCP client says to begin with.
TINY = Bounds(SMALL_BYTES, 1000, depth=32)

AT_ONCE = 2
OF_ONE_TENANT = 100
# Whose long texts are decoded where they are read.
_ENCODED = ("content_base64",)
MIB = 1024 * 1024


class Held(Protocol):
    def hold_unpacked(self, owner: str, size: int) -> None: ...


class BodyTooLarge(InvalidConfiguration):
    @property
    def http_status(self) -> int:
        return 413


def submit_read(body: Any, size: int, owner: str) -> Future[Read]:
    """What a temporary file of so many bytes says in JSON, with its long texts of base64 decoded;
    `owner` is the tenant. It holds up nobody else.

    Raises RateLimited for a tenant that has too many of them. The future raises TooMuch, ValueError
    for what is no JSON, and CannotRead.
    """
    return _readers.submit(owner, lambda: read_file(body, size, _ENCODED))


def value_of(read: Future[Read], bounds: Bounds) -> Any:
    """What was read. Raises InvalidConfiguration for what is no JSON, BodyTooLarge for too much of
    it, and ProviderUnavailable where it could not be read."""
    try:
        found = read.result()
        if found.values > bounds.values:
            raise TooMuch(f"Must hold at most {bounds.values} values")
    except TooMuch as error:
        raise BodyTooLarge(f"body: {error}.", field="body") from None
    except CannotRead as error:
        raise ProviderUnavailable(
            f"The body could not be read now: {error}.", retry_after=5
        ) from error
    except ValueError as error:
        raise InvalidConfiguration(f"body: Must be JSON: {error}.", field="body") from None
    return found.value


def reading(text: bytes, bounds: Bounds) -> Future[Read]:
    """A small text, read in place."""
    read: Future[Read] = Future()
    try:
        read.set_result(read_text(text, bounds))
    except ValueError as error:
        read.set_exception(error)
    return read


def ensure_text_size(text: bytes, bounds: Bounds) -> None:
    """Raises BodyTooLarge."""
    if len(text) > bounds.bytes:
        raise BodyTooLarge(f"body: Must be at most {bounds.bytes} bytes.", field="body")


def requests_of(size: int) -> int:
    """As how many requests one with so large a body counts: one more for each megabyte begun, from
    the second on."""
    return max(1, -(-size // MIB))


_readers = Executor(
    "body-reader",
    threads=AT_ONCE,
    of_one=AT_ONCE - 1,
    most=OF_ONE_TENANT,
    refusal=f"{OF_ONE_TENANT} large requests of the tenant are being read. Send it again.",
)

# Generated from cofferdam/_async by make_sync.py: do not edit.
"""Send requests, with retries, and raise the client's errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from cofferdam.calls import Call
from cofferdam.errors import CofferdamError, InvalidSettings, UnexpectedAnswer, Unreachable
from cofferdam.errors import service_error as error_of
from cofferdam.retries import Retries
from cofferdam.settings import Settings

# A run may take 300 seconds, and wait for its turn before.
READ_SECONDS = 330.0
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Transport:
    """The connections to one service with one API key."""

    def __init__(self, settings: Settings, retries: Retries, read_seconds: float) -> None:
        timeout = httpx.Timeout(read_seconds, connect=10, write=60, pool=60)
        self._settings = settings
        self._retries = retries
        self._client = httpx.Client(
            timeout=timeout,
            headers={"X-API-Key": settings.api_key, "User-Agent": "cofferdam-client"},
        )

    def close(self) -> None:
        self._client.close()

    def json(self, call: Call) -> Any:
        """Send a request and return the answer's JSON. Raises CofferdamError."""
        return json_of(self.send(call))

    def send(self, call: Call) -> httpx.Response:
        """Send a request and return the whole answer. Raises CofferdamError."""
        return self._again(call, is_streamed=False)

    def open(self, call: Call) -> httpx.Response:
        """Send a request and return a successful answer without its body. The caller closes it."""
        return self._again(call, is_streamed=True)

    def _again(self, call: Call, *, is_streamed: bool) -> httpx.Response:
        attempt, waited = 0, 0.0
        while True:
            attempt += 1
            try:
                return self._once(call, is_streamed=is_streamed)
            except CofferdamError as error:
                pause = self._retries.pause(
                    error, attempt, waited, is_repeatable=call.is_repeatable
                )
                if pause is None:
                    raise
            time.sleep(pause)
            waited += pause

    def _once(self, call: Call, *, is_streamed: bool) -> httpx.Response:
        with reaching(self._settings.url):
            request = self._client.build_request(
                call.method,
                self._settings.url + call.path,
                params=dict(call.params) or None,
                json=call.json,
                content=call.content,
                headers=dict(call.headers),
            )
            answer = self._client.send(request, stream=is_streamed)
            if answer.is_success:
                return answer
            answer.read()
        raise _error_of(answer)


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Raise errors of httpx as errors of this client."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as problem:
        raise InvalidSettings(f"COFFERDAM_URL: {problem}") from problem
    except (httpx.TransportError, httpx.StreamError) as problem:
        message = f"{url} did not answer: {str(problem) or type(problem).__name__}"
        raise Unreachable(message, sent=not isinstance(problem, _UNSENT)) from problem
    except httpx.DecodingError as problem:
        raise UnexpectedAnswer(
            f"{url} sent an answer that cannot be decoded: {problem}"
        ) from problem


def json_of(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise UnexpectedAnswer("The answer is not JSON.", answer.status_code) from None


def _error_of(answer: httpx.Response) -> CofferdamError:
    try:
        body = answer.json()
    except ValueError:
        body = None
    told = answer.headers.get("Retry-After", "")
    return error_of(answer.status_code, body, float(told) if told.isdecimal() else None)

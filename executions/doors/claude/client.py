"""The API of Claude's self-hosted environments, as far as a worker needs it.

A token goes to one address: no redirect is followed, and where a name leads is checked at each
connection. What comes back is bounded, and read as what a stranger has sent.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpx
from django.views.decorators.debug import sensitive_variables

from executions.kernel import http
from executions.kernel.http import Answer, Budget, FetchError, exchange
from providers.json_reading import Bounds, read_text
from providers.remote.receiver import Receiver
from providers.remote.secret import Secret

BETA = "managed-agents-2026-04-01"
VERSION = "2023-06-01"
# How long the server holds a poll without work.
POLL_MS = 999
NO_HEARTBEAT = "NO_HEARTBEAT"
LEASE_LOST = 412
PAGE = 100
# Of an answer, and of one event of a stream.
MOST_BYTES = 16 * 1024 * 1024
MOST_PAGES = 10_000
# A stream is opened anew after this, and where nothing has come for so long.
STREAM_SECONDS, PAUSE_SECONDS = 600.0, 60.0
_BOUNDS = Bounds(MOST_BYTES, 200_000, depth=64)
_RETRYABLE = (408, 409, 429)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_TOKEN = re.compile(r"[!-~]{1,8192}")


class Unavailable(Exception):
    """The server did not answer, or wants the same request again later."""


class Refused(Exception):
    """The server does not take it, and would not take it again. `status` is HTTP's, 0 for an
    answer that is none of the protocol."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Work:
    """An item of the queue. `session_id` is "" for what is no session of an agent. `token` is for
    all that concerns this item; without one that is the key of the environment."""

    id: str
    session_id: str
    token: Secret | None


@dataclass(frozen=True)
class Beat:
    """What became of a heartbeat. `seconds` is how long the lease lasts from now on."""

    last: str
    seconds: float
    goes_on: bool


@dataclass(frozen=True)
class AgentSession:
    """A session of an agent: who it is, as the server says."""

    id: str
    agent: str
    model: str
    is_terminated: bool


class Client:
    """Requests with one token to one address. All raise Unavailable and Refused."""

    def __init__(self, address: str, token: Secret, receiver: Receiver) -> None:
        self.address = address.rstrip("/")
        self._token = token
        self._receiver = receiver

    def with_token(self, token: Secret) -> Client:
        """Return a client of the same address."""
        return Client(self.address, token, self._receiver)

    def poll(self, environment_id: str, worker_id: str) -> Work | None:
        """Take the next item of the queue; None where there is none now."""
        path = f"/v1/environments/{quote(environment_id, safe='')}/work/poll"
        query = {"block_ms": POLL_MS}
        said = self._get(path, query, **{"Anthropic-Worker-ID": worker_id})
        return _work(said, environment_id)

    def acknowledge(self, environment_id: str, work: Work) -> None:
        """Have an item be this worker's."""
        self._post(f"{_item(environment_id, work)}/ack")

    def beat(self, environment_id: str, work: Work, last: str) -> Beat:
        """Extend the lease. Raises Refused with LEASE_LOST where it is another worker's."""
        query = {"expected_last_heartbeat": last}
        said = self._post(f"{_item(environment_id, work)}/heartbeat", query, reads=True)
        seconds = said.get("ttl_seconds")
        return Beat(
            str(said.get("last_heartbeat"))[:100],
            float(seconds) if type(seconds) is int and 0 < seconds < 86_400 else 0.0,
            said.get("lease_extended") is True and said.get("state") not in ("stopping", "stopped"),
        )

    def stop(self, environment_id: str, work: Work) -> None:
        """End an item for good."""
        self._post(f"{_item(environment_id, work)}/stop", body={"force": True})

    def session(self, session_id: str) -> AgentSession:
        """Return what is known of a session."""
        said = self._get(_session(session_id), {})
        if not isinstance(said, dict):
            raise Refused(0, "The server did not return a session.")
        agent = _object(said.get("agent"))
        model = _object(agent.get("model"))
        return AgentSession(
            session_id,
            _text(agent.get("name")),
            _text(model.get("id")),
            said.get("status") == "terminated",
        )

    def events(self, session_id: str) -> Iterator[Mapping[str, Any]]:
        """Yield all events of a session until now, the oldest first."""
        query: dict[str, Any] = {"limit": PAGE}
        for _ in range(MOST_PAGES):
            said = _object(self._get(f"{_session(session_id)}/events", query))
            found = said.get("data")
            if not isinstance(found, list):
                raise Refused(0, "The server did not return events.")
            yield from (each for each in found if isinstance(each, dict))
            page = said.get("next_page")
            if not isinstance(page, str) or not page:
                return
            if page == query.get("page"):
                raise Refused(0, "The server returned the same page of events again.")
            query["page"] = page
        raise Refused(0, f"The session has more than {MOST_PAGES} pages of events.")

    def stream(self, session_id: str, budget: Budget) -> Iterator[Mapping[str, Any] | None]:
        """Yield events as they come, after a None once the stream is open. Ends with the stream."""
        url = httpx.URL(self._url(f"{_session(session_id)}/events/stream", {}))
        headers = {**self._headers(), "Accept": "text/event-stream"}
        try:
            with exchange(url, self._receiver, budget, "GET", headers) as answer:
                _ensure_taken(Answer("", status=answer.status))
                yield None
                yield from _events(answer.iter_stream(), budget)
        except FetchError as error:
            raise Unavailable(error.text) from None

    def send(self, session_id: str, *events: Mapping[str, Any]) -> None:
        """Add events to a session."""
        self._post(f"{_session(session_id)}/events", body={"events": events})

    def _get(self, path: str, query: Mapping[str, Any], **headers: str) -> Any:
        answer = http.get(
            self._url(path, query),
            {**self._headers(), **headers},
            self._receiver,
            most_bytes=MOST_BYTES,
        )
        _ensure_taken(answer)
        return _json(answer.body)

    def _post(
        self,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        body: Any = None,
        reads: bool = False,
    ) -> Mapping[str, Any]:
        content = b"" if body is None else json.dumps(body).encode()
        answer = http.post_json(
            self._url(path, query or {}), content, self._headers(), self._receiver, reads=reads
        )
        _ensure_taken(answer)
        return _object(_json(answer.body)) if reads else {}

    def _url(self, path: str, query: Mapping[str, Any]) -> str:
        # A lone surrogate is not of a text that the server had from us.
        asked = urlencode({"beta": "true", **query}, errors="replace")
        return f"{self.address}{path}?{asked}"

    @sensitive_variables()
    def _headers(self) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self._token.reveal()}",
            "Content-Type": "application/json",
            "anthropic-version": VERSION,
            "anthropic-beta": BETA,
        }


def stream_budget() -> Budget:
    """Return what one stream may take. Its `cut` ends the stream from another thread."""
    return Budget(time.monotonic() + STREAM_SECONDS, PAUSE_SECONDS)


def _item(environment_id: str, work: Work) -> str:
    return f"/v1/environments/{quote(environment_id, safe='')}/work/{quote(work.id, safe='')}"


def _session(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}"


def _ensure_taken(answer: Answer) -> None:
    if not answer.problem and 200 <= answer.status < 300:
        return
    problem = answer.problem or f"HTTP {answer.status}"
    if 300 <= answer.status < 500 and answer.status not in _RETRYABLE:
        raise Refused(answer.status, problem)
    if 200 <= answer.status < 300:
        # It would be as long the next time.
        raise Refused(0, problem)
    raise Unavailable(problem)


def _json(body: bytes) -> Any:
    if not body.strip():
        return None
    try:
        return read_text(body, _BOUNDS).value
    except ValueError as error:
        raise Refused(0, f"The server's answer is not JSON: {error}.") from None


def _work(said: Any, environment_id: str) -> Work | None:
    if said is None:
        return None
    item = _object(said)
    if item.get("environment_id", environment_id) != environment_id:
        raise Refused(0, "The server returned an item of another environment.")
    work_id, data = _id(item.get("id")), _object(item.get("data"))
    if not work_id:
        raise Refused(0, "The server did not return an item of the queue.")
    session_id = _id(data.get("id")) if data.get("type") == "session" else ""
    return Work(work_id, session_id, _token_in(item.get("secret")))


@sensitive_variables()
def _token_in(secret: Any) -> Secret | None:
    """The token of an item, None where it has none: base64 of JSON."""
    if not isinstance(secret, str) or len(secret) > _BOUNDS.bytes:
        return None
    try:
        decoded = base64.urlsafe_b64decode(secret + "=" * (-len(secret) % 4))
        token = _object(read_text(decoded, _BOUNDS).value).get("sessions_token")
    except ValueError:
        return None
    return Secret(token) if isinstance(token, str) and _TOKEN.fullmatch(token) else None


def _events(pieces: Iterator[bytes], budget: Budget) -> Iterator[Mapping[str, Any]]:
    """The events of a stream of server-sent events, whose data is JSON."""
    buffer, data = bytearray(), bytearray()
    budget.allow(MOST_BYTES)
    for piece in pieces:
        buffer += piece
        if b"\n" not in piece:
            continue
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in map(bytearray.rstrip, lines):
            if line.startswith(b"data:"):
                data += line.removeprefix(b"data:").strip() + b"\n"
            elif not line and data:
                found = _json(bytes(data))
                data = bytearray()
                # Each event has as much room as the first.
                budget.allow(MOST_BYTES)
                if isinstance(found, dict):
                    yield found
        if not data and not buffer:
            budget.allow(MOST_BYTES)


def _id(value: Any) -> str:
    return value if isinstance(value, str) and _ID.fullmatch(value) else ""


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

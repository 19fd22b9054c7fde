"""The queue of a self-hosted environment of Claude, and its agents' sessions, over a real socket.

It gives out items, keeps leases, and says what an agent would say. `tests/doors/claude` drives the
vendor's own worker against it too, so that it stays as the protocol is.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

NOW = "2026-11-26T00:00:00Z"
ENVIRONMENT, KEY = "env_test", "environment-key-0123456789"
SECONDS = 60.0
# Of a page of events: a history has several.
PAGE = 3


@dataclass
class Item:
    """One item of the queue. `beats` are its heartbeats in the hands of one worker."""

    id: str
    session: str
    state: str = "queued"
    beats: list[str] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    is_stopped: bool = False


class Queue:
    """Serves until closed. `seconds` is how long a lease lasts."""

    def __init__(self, seconds: int = 2, tls: ssl.SSLContext | None = None) -> None:
        self.seconds = seconds
        self.key = KEY
        self.items: list[Item] = []
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.requests: list[tuple[str, str, str]] = []
        # Paths, or methods and paths, that are answered with a status instead, once for each.
        self.statuses: dict[str, list[int]] = {}
        # Answers to paths that come first: bytes, or what is JSON.
        self.lies: dict[str, list[Any]] = {}
        # What follows each page of a history, "" for the next one.
        self.page_after = ""
        self._changed = threading.Condition()
        self._is_closing = False
        self._numbers = iter(range(1, 10**9))
        queue = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                try:
                    queue.serve(self)
                except (OSError, ValueError):
                    self.close_connection = True

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            self.url = f"https://localhost:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def add_session(self, session: str) -> Item:
        """Have a new agent's session wait for a worker."""
        with self._changed:
            self.events.setdefault(session, [])
            item = Item(f"work_{next(self._numbers)}", session)
            self.items.append(item)
            self._changed.notify_all()
        return item

    def take_away(self, item: Item) -> None:
        """Give an item to whoever asks next, as when its lease has lapsed."""
        with self._changed:
            item.state, item.beats = "queued", []
            self._changed.notify_all()

    def say(self, session: str, kind: str, **said: Any) -> str:
        """Add an event, and return its id."""
        with self._changed:
            # Unique among all queues: records are found by it.
            event_id = f"sevt_{uuid4().hex}"
            event = {"type": kind, "id": event_id, "processed_at": NOW, **said}
            self.events[session].append(event)
            self._changed.notify_all()
        return event_id

    def call(self, session: str, name: str, permission: str = "allow", /, **given: Any) -> str:
        """Have the agent use a tool."""
        return self.say(
            session, "agent.tool_use", name=name, input=given, evaluated_permission=permission
        )

    def end_turn(self, session: str) -> None:
        self.say(session, "session.status_idle", stop_reason={"type": "end_turn"})

    def wait_for_action(self, session: str, *calls: str) -> None:
        """Have the agent wait for clients."""
        reason = {"type": "requires_action", "event_ids": list(calls)}
        self.say(session, "session.status_idle", stop_reason=reason)

    def change(self, session: str, call: str, **said: Any) -> None:
        """Have the history say something else of a call."""
        with self._changed:
            next(each for each in self.events[session] if each["id"] == call).update(said)

    def forget(self, session: str, call: str) -> None:
        """Have the history say nothing of what was said of a call."""
        with self._changed:
            kept = [each for each in self.events[session] if each.get("tool_use_id") != call]
            self.events[session] = kept

    def result(self, call: str) -> dict[str, Any]:
        """Wait for the result of a call."""
        return self.wait_for("user.tool_result", call)

    def wait_for(self, kind: str, call: str) -> dict[str, Any]:
        """Wait for what a worker says of a call."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = self.said(kind, call)
            return bool(found)

        self.wait(is_there)
        return found[0]

    def said(self, kind: str, call: str) -> list[dict[str, Any]]:
        every = [each for events in self.events.values() for each in events]
        return [each for each in every if each["type"] == kind and each["tool_use_id"] == call]

    def wait(self, is_so: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(is_so, SECONDS), self.requests[-20:]

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        split = urlsplit(handler.path)
        query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        size = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(size) or b"null")
        token = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        with self._changed:
            self.requests.append((handler.command, split.path, token))
            self._changed.notify_all()
            what = split.path.rpartition("/")[2]
            ordered = self.statuses.get(what) or self.statuses.get(f"{handler.command} {what}")
            status = ordered.pop(0) if ordered else 0
        if status:
            _send(handler, status, {"error": {"type": "ordered"}}, Location="/elsewhere")
            return
        if lies := self.lies.get(what):
            _send(handler, 200, lies.pop(0))
            return
        parts = split.path.strip("/").split("/")
        if parts[:3] == ["v1", "environments", ENVIRONMENT]:
            self._serve_work(handler, parts[4:], query, token)
        elif parts[:2] == ["v1", "sessions"] and parts[2] in self.events:
            self._serve_session(handler, parts[2], parts[3:], query, body, token)
        else:
            _send(handler, 404, {"error": {"type": "not_found"}})

    def _serve_work(
        self,
        handler: BaseHTTPRequestHandler,
        parts: list[str],
        query: Mapping[str, str],
        token: str,
    ) -> None:
        if parts == ["poll"]:
            if token != self.key:
                _send(handler, 401, {"error": {"type": "authentication"}})
                return
            worker = handler.headers.get("Anthropic-Worker-ID") or ""
            item = self._next(worker, int(query.get("block_ms", 0)) / 1000)
            _send(handler, 200, None if item is None else self._shape(item, secret=True))
            return
        item = next(each for each in self.items if each.id == parts[0])
        if token not in (self.key, _token(item)):
            _send(handler, 401, {"error": {"type": "authentication"}})
            return
        with self._changed:
            status, answer = self._change(item, parts[1], query)
            self._changed.notify_all()
        _send(handler, status, answer)

    def _next(self, worker: str, seconds: float) -> Item | None:
        def waiting() -> Item | None:
            return next((each for each in self.items if each.state == "queued"), None)

        with self._changed:
            self._changed.wait_for(lambda: waiting() or self._is_closing, seconds)
            item = waiting()
            if item is not None:
                item.state = "starting"
                item.workers.append(worker)
            return item

    def _change(self, item: Item, what: str, query: Mapping[str, str]) -> tuple[int, Any]:
        if what == "heartbeat":
            known = item.beats[-1] if item.beats else "NO_HEARTBEAT"
            if query.get("expected_last_heartbeat") != known or item.state == "queued":
                state = {"state": item.state, "lease_extended": False, "ttl_seconds": self.seconds}
                details = {"error_code": "heartbeat_precondition_failed", "current_state": state}
                return 412, {"type": "error", "error": {"type": "x", "details": details}}
            item.state = "stopped" if item.is_stopped else "active"
            item.beats.append(f"{time.time():.6f}")
            return 200, {
                "type": "work_heartbeat",
                "last_heartbeat": item.beats[-1],
                "lease_extended": not item.is_stopped,
                "state": item.state,
                "ttl_seconds": self.seconds,
            }
        if what == "stop":
            item.is_stopped, item.state = True, "stopped"
        return 200, self._shape(item)

    def _shape(self, item: Item, *, secret: bool = False) -> dict[str, Any]:
        hidden = base64.urlsafe_b64encode(json.dumps({"sessions_token": _token(item)}).encode())
        return {
            "id": item.id,
            "type": "work",
            "created_at": NOW,
            "data": {"id": item.session, "type": "session"},
            "environment_id": ENVIRONMENT,
            "metadata": {},
            "state": item.state,
            **({"secret": hidden.decode().rstrip("=")} if secret else {}),
        }

    def _serve_session(
        self,
        handler: BaseHTTPRequestHandler,
        session: str,
        parts: list[str],
        query: Mapping[str, str],
        body: Any,
        token: str,
    ) -> None:
        of_it = [_token(each) for each in self.items if each.session == session]
        if token not in (self.key, *of_it):
            _send(handler, 401, {"error": {"type": "authentication"}})
        elif not parts:
            _send(handler, 200, _session(session))
        elif parts == ["events", "stream"]:
            self._stream(handler, session)
        elif handler.command == "POST":
            for each in body["events"]:
                said = {name: value for name, value in each.items() if name != "type"}
                self.say(session, each["type"], **said)
            _send(handler, 200, {"data": []})
        else:
            page = query.get("page", "0")
            begin = int(page) if page.isdecimal() else 0
            end = begin + min(PAGE, int(query.get("limit", PAGE)))
            with self._changed:
                events = self.events[session][:]
            following = self.page_after or (str(end) if end < len(events) else None)
            _send(handler, 200, {"data": events[begin:end], "next_page": following})

    def _stream(self, handler: BaseHTTPRequestHandler, session: str) -> None:
        with self._changed:
            at = len(self.events[session])
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b": open\n\n")
        handler.close_connection = True
        while not self._is_closing:
            with self._changed:
                if len(self.events[session]) == at:
                    self._changed.wait(1.0)
                found = self.events[session][at:]
            at += len(found)
            for each in found:
                text = f"event: {each['type']}\ndata: {json.dumps(each)}\n\n"
                handler.wfile.write(text.encode())
            handler.wfile.write(b": ping\n\n")


def _token(item: Item) -> str:
    return f"token-of-{item.id}"


def _session(session: str) -> dict[str, Any]:
    agent = {
        "id": "agent_1",
        "type": "agent",
        "name": "helper",
        "version": 1,
        "skills": [],
        "tools": [],
        "mcp_servers": [],
        "model": {"id": "claude-test"},
        "execution_identity": {"type": "service_account"},
    }
    return {
        "id": session,
        "type": "session",
        "status": "running",
        "agent": agent,
        "environment_id": ENVIRONMENT,
        "created_at": NOW,
        "updated_at": NOW,
        "metadata": {},
        "resources": [],
        "vault_ids": [],
        "outcome_evaluations": [],
        "stats": {},
        "usage": {},
    }


def _send(handler: BaseHTTPRequestHandler, status: int, body: Any, **headers: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def queue_over_tls(certificate: Path, seconds: int = 9) -> Iterator[Queue]:
    """One at `https://localhost`, with this certificate and its key in one file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    queue = Queue(seconds, context)
    try:
        yield queue
    finally:
        queue.close()

"""Sandboxes of the E2B API: made, found and ended, snapshots of their files, and forks.

Each is a session of the key's tenant. Memory and processes are in no snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote
from uuid import UUID

from django.http import HttpResponse
from django.utils import timezone
from rest_framework.request import Request

from executions.doors.e2b import connect, credentials, network
from executions.doors.e2b.connect import Refused, control_error_body, invalid, unimplemented
from executions.doors.e2b.frame import ControlView
from executions.doors.native.frame import deferred
from executions.doors.native.rendering import json_response
from executions.kernel.coroutines import wait_for
from executions.kernel.text import is_storable
from executions.runs.requests import Conflict
from executions.sessions import control
from executions.sessions.capacity import suspend_in_thread
from executions.sessions.control import is_without_network, open_session
from executions.sessions.ending import close
from executions.sessions.files import inspect
from executions.sessions.models import Session, Snapshot
from executions.sessions.networks import change_network, promises_no_network
from executions.sessions.queries import (
    LivingFilter,
    expires_at,
    living_session_of,
    living_sessions,
    session_of,
)
from executions.sessions.requests import (
    NoSuchSession,
    SessionAsleep,
    SessionClosed,
    SessionLost,
    SessionRequest,
    ensure_not_ended,
)
from executions.sessions.storage import snapshots
from executions.sessions.storage.snapshots import NoSuchSnapshot, SnapshotRequest
from executions.sessions.storage.wake import ensure_awake
from providers.errors import InvalidConfiguration, SandboxError
from providers.waiting import within

_MOST_METADATA = 20
_LOOK_SECONDS = 0.1
_METRIC_SECONDS = 5
_STATES = {"running": Session.State.OPEN.value, "paused": Session.State.ASLEEP.value}


class SandboxApiView(ControlView):
    def session(self, sandbox_id: str) -> Session:
        """One that has not ended. Raises NoSuchSession and Conflict."""
        return living_session_of(self.api_key.tenant, _uuid(sandbox_id))

    def body(self) -> Mapping[str, Any]:
        body = {} if self.request.data is None else self.request.data
        if not isinstance(body, dict):
            raise invalid("Must be a JSON object.")
        return body


class SandboxesView(SandboxApiView):
    def get(self, request: Request) -> HttpResponse:
        """Those that run; clients of the second version may ask for paused ones as well."""
        query = request.query_params
        is_second = request.path.startswith("/v2/")
        states = query.get("state", "running,paused" if is_second else "running").split(",")
        wanted = LivingFilter(
            [_STATES[state] for state in states if state in _STATES],
            _metadata_in(query.get("metadata", "")),
            opened_after=_moment_in(query.get("startedAfter", "")),
            templates=_templates_in(query.get("template", "")),
            is_oldest_first=_is_oldest_first(query.get("order", "desc")),
        )
        page = living_sessions(
            self.api_key.tenant,
            wanted,
            cursor_in(query.get("nextToken", "")),
            limit_in(query.get("limit", str(connect.MOST_LISTED))),
        )
        answer = json_response([connect.summary(session) for session in page.sessions])
        if page.next_cursor and is_second:
            answer["X-Next-Token"] = page.next_cursor
        return answer

    @deferred
    async def post(self, request: Request) -> HttpResponse:
        body = self.body()
        named = network.network_of_new(body, self.api_key.tenant.slug)
        wanted = connect.request_of(body, named)
        try:
            session = await open_session(wanted, self.caller())
        except InvalidConfiguration as error:
            if error.field != "offline":
                raise
            raise invalid(
                "allow_internet_access: No provider here guarantees a sandbox without internet "
                "access."
            ) from None
        if not connect.pauses_at_its_end(session) and connect.age_of(session) > 1:
            # Its time begins when it is there, however long that took.
            changes = connect.end_after(session, wanted.max_seconds, is_bounded=True)
            control.change(session, changes, self.by())
        return json_response(connect.create_answer(session, self.api_key), 201)


class OneSandboxView(SandboxApiView):
    def get(self, request: Request, sandbox_id: str) -> HttpResponse:
        session = self.session(sandbox_id)
        told = {**connect.detail(session, self.api_key), **network.detail(session)}
        return json_response(told)

    @deferred
    async def delete(self, request: Request, sandbox_id: str) -> HttpResponse:
        session = session_of(self.api_key.tenant, _uuid(sandbox_id))
        if session.closed_at is not None:
            raise NoSuchSession("The sandbox was not found.")
        await close(session, self.by())
        return HttpResponse(status=204)


class ConnectView(SandboxApiView):
    @deferred
    async def post(self, request: Request, sandbox_id: str) -> HttpResponse:
        """Have it run for so long from now on at least; one that sleeps is woken."""
        session = self.session(sandbox_id)
        wanted = connect.seconds_in(self.body()) or connect.DEFAULT_SECONDS
        slept = session.state == Session.State.ASLEEP
        if slept:
            await ensure_awake(session)
        # Not before: it has grown older while it was woken.
        seconds = connect.clamp_seconds(session, wanted)
        if slept or _seconds_left(session) < seconds:
            changes = connect.end_after(session, seconds, is_bounded=True)
            control.change(session, changes, self.by())
        return json_response(connect.create_answer(session, self.api_key), 201 if slept else 200)


class TimeoutView(SandboxApiView):
    def post(self, request: Request, sandbox_id: str) -> HttpResponse:
        session = self.session(sandbox_id)
        seconds = connect.seconds_in(self.body())
        if seconds is None:
            raise invalid("timeout: This field is required.")
        try:
            control.change(session, connect.end_after(session, seconds), self.by(), if_awake=True)
        except SessionAsleep:
            # What is kept has no timeout: a late call to keep it alive would have it removed.
            raise NoSuchSession("The sandbox is paused. Connect to it.") from None
        return HttpResponse(status=204)


class NetworkView(SandboxApiView):
    @deferred
    async def put(self, request: Request, sandbox_id: str) -> HttpResponse:
        """Replace the sandbox's own network. One that sleeps is not woken."""
        session = self.session(sandbox_id)
        asked = network.network_of_change(self.body(), session.tenant_slug)
        if asked == network.NOTHING and not await promises_no_network(session):
            raise invalid(
                "denyOut: The provider of this sandbox does not guarantee a sandbox without "
                "internet access. Create one with allow_internet_access=False."
            )
        await change_network(session, asked, self.by())
        return HttpResponse(status=204)


class PauseView(SandboxApiView):
    @deferred
    async def post(self, request: Request, sandbox_id: str) -> HttpResponse:
        """Its files are kept, and neither memory nor processes."""
        try:
            session = self.session(sandbox_id)
            if session.state == Session.State.ASLEEP:
                raise Refused(409, "failed_precondition", "The sandbox is already paused.")
            if not (await suspend_in_thread(session, f"by {self.by()}")):
                session.refresh_from_db()
                ensure_not_ended(session)
                raise Conflict("The sandbox is busy, or its files are not saved.")
        except (SessionClosed, SessionLost):
            raise
        except Conflict as error:
            # 409 means to clients that it is paused, and its files are kept.
            raise Refused(423, "failed_precondition", error.message) from None
        # Not before: one that goes on ends when it was to.
        control.change(session, connect.pause_changes(session), self.by())
        return HttpResponse(status=204)


class MetricsView(SandboxApiView):
    @deferred
    async def get(self, request: Request, sandbox_id: str) -> HttpResponse:
        """As it is now, where that lies between `start` and `end`: the past is not kept. The
        processor is looked at twice, a moment apart."""
        session = self.session(sandbox_id)
        query = request.query_params
        is_now = _is_now(query.get("start", ""), query.get("end", ""))
        if not is_now or session.state == Session.State.ASLEEP:
            return json_response([])
        before = await inspect(session)
        began = time.monotonic()
        await wait_for(within(_LOOK_SECONDS, Future()))
        seen = await inspect(session)
        seconds = time.monotonic() - began
        used = (seen.cpu_seconds or 0) - (before.cpu_seconds or 0)
        now = timezone.now()
        about = connect.summary(session)
        return json_response(
            [
                {
                    "timestamp": connect.moment(now),
                    "timestampUnix": int(now.timestamp()),
                    "cpuCount": about["cpuCount"],
                    "cpuUsedPct": round(max(0.0, 100 * used / seconds), 2),
                    "memUsed": seen.memory_bytes or 0,
                    "memTotal": connect.memory_total(session),
                    "memCache": 0,
                    "diskUsed": seen.disk_bytes or 0,
                    "diskTotal": seen.disk_total_bytes or about["diskSizeMB"] * 1024 * 1024,
                }
            ]
        )


class NotHereView(ControlView):
    """What E2B has and this service has not, for whoever asks."""

    authentication_classes = ()
    permission_classes = ()

    def get(self, request: Request, **given: str) -> HttpResponse:
        raise unimplemented(f"{request.method} {request.path[:100]}")

    post = put = patch = delete = get


def _uuid(sandbox_id: str) -> UUID:
    # Older clients put the client's id behind it.
    found = credentials.session_id_of(sandbox_id.partition("-")[0])
    if found is None:
        raise NoSuchSession("The sandbox was not found.")
    return found


def _seconds_left(session: Session) -> float:
    return (expires_at(session) - timezone.now()).total_seconds()


def limit_in(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text)):
        raise invalid("limit: Must be a whole number above 0.")
    return min(int(text), connect.MOST_LISTED)


def _is_oldest_first(order: str) -> bool:
    if order not in ("asc", "desc"):
        raise invalid("order: Must be asc or desc.")
    return order == "asc"


def _moment_in(text: str) -> datetime | None:
    """A moment of ISO 8601. Without a zone it is one of UTC. Before 1970 there was no sandbox."""
    if not text:
        return None
    try:
        when = datetime.fromisoformat(text)
        moment = when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
        return max(moment, datetime.fromtimestamp(0, UTC))
    except (ValueError, OverflowError):
        raise invalid("startedAfter: Must be a time in ISO 8601.") from None


def _templates_in(name: str) -> list[str] | None:
    """What sessions of this template have for one; None for every template."""
    if not is_storable(name):
        raise invalid("template: Must hold neither NUL nor lone surrogates.")
    return connect.template_names(name) if name else None


def _is_now(start: str, end: str) -> bool:
    """Whether the time in which somebody asks lies between both, seconds since 1970.

    A measurement counts for some seconds, as E2B's: who asks for all until now asks a moment after
    he looked at his clock, which need not be ours.
    """
    now = time.time()
    return _seconds_in(start, "start", 0) - _METRIC_SECONDS <= now and (
        now <= _seconds_in(end, "end", now) + _METRIC_SECONDS
    )


def _seconds_in(text: str, field: str, usual: float) -> float:
    if not text:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) < 13):
        raise invalid(f"{field}: Must be whole seconds since 1970.")
    return int(text)


def cursor_in(text: str) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        raise invalid("nextToken: Must be a nextToken of an earlier answer.") from None


def _metadata_in(text: str) -> dict[str, str]:
    """A query in a query: clients quote each name and value once more."""
    if len(text) > 4096:
        raise invalid("metadata: Must be at most 4096 characters.")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_METADATA)
    except ValueError:
        raise invalid(f"metadata: Must be at most {_MOST_METADATA} names.") from None
    wanted = {unquote(name): unquote(value) for name, value in pairs}
    if not all(map(is_storable, (*wanted, *wanted.values()))):
        raise invalid("metadata: Must hold neither NUL nor lone surrogates.")
    return wanted


# Each is a sandbox of its own, and all of them are waited for.
MOST_FORKS = 10


class TakeView(SandboxApiView):
    @deferred
    async def post(self, request: Request, sandbox_id: str) -> HttpResponse:
        session = self.session(sandbox_id)
        name = self.body().get("name") or ""
        if not isinstance(name, str):
            raise invalid("name: Must be a string.")
        taken = await snapshots.take_snapshot(session, SnapshotRequest(name=name), self.caller())
        return json_response(detail(taken), 201)


class SnapshotsView(SandboxApiView):
    def get(self, request: Request) -> HttpResponse:
        """The tenant's, newest first; of one sandbox, or of one name."""
        query = request.query_params
        source, name = query.get("sandboxID", ""), query.get("name", "")
        if not is_storable(name):
            raise invalid("name: Must hold neither NUL nor lone surrogates.")
        wanted = snapshots.SnapshotFilter(
            limit=limit_in(query.get("limit", str(connect.MOST_LISTED))),
            cursor=cursor_in(query.get("nextToken", "")),
        )
        session_id = credentials.session_id_of(source) if source else None
        if source and session_id is None:
            return json_response([])
        page = snapshots.list_snapshots(
            self.api_key.tenant, wanted, source=session_id, name=name.partition(":")[0]
        )
        answer = json_response([detail(each) for each in page.snapshots])
        if page.next_cursor:
            answer["X-Next-Token"] = page.next_cursor
        return answer


class SnapshotView(SandboxApiView):
    def delete(self, request: Request, snapshot_id: str) -> HttpResponse:
        found = credentials.session_id_of(snapshot_id.partition(":")[0])
        if found is None:
            raise NoSuchSnapshot("There is no such snapshot.")
        snapshot = snapshots.snapshot_of(self.api_key.tenant, found)
        if not snapshots.remove(snapshot, self.by()):
            raise NoSuchSnapshot("There is no such snapshot.")
        return HttpResponse(status=204)


class ForkView(SandboxApiView):
    @deferred
    async def post(self, request: Request, sandbox_id: str) -> HttpResponse:
        """Others that begin with its files. How each of them failed is told in its place."""
        session = self.session(sandbox_id)
        body = self.body()
        count = body.get("count") or 1
        if type(count) is not int or not 0 < count <= MOST_FORKS:
            raise invalid(f"count: Must be a whole number from 1 to {MOST_FORKS}.")
        seconds = connect.seconds_in(body) or connect.DEFAULT_SECONDS
        # What was opened without a network must not have one as a copy, whatever the route is now.
        is_offline = await is_without_network(session)
        taken = await snapshots.take_snapshot(session, SnapshotRequest(), self.caller())
        try:
            told = []
            for _ in range(count):
                told.append(await self._fork(session, taken, seconds, is_offline))
        finally:
            # Under a legal hold it stays. What was opened is told all the same.
            with suppress(Conflict):
                snapshots.remove(taken, self.by())
        return json_response(told, 201)

    async def _fork(
        self, session: Session, taken: Snapshot, seconds: int, is_offline: bool
    ) -> dict[str, Any]:
        wanted = SessionRequest(
            language=session.language,
            template=session.template,
            idle_seconds=seconds,
            max_seconds=seconds,
            env=dict(session.env or {}),
            metadata=dict(session.metadata or {}),
            # Not what a sandbox has that names none: that may be more.
            network=network.network_of_copy(session),
            offline=is_offline,
            **connect.from_snapshot(taken.pk),
        )
        try:
            made = await open_session(wanted, self.caller())
        except SandboxError as error:
            return {"error": control_error_body(error)}
        return {"sandbox": connect.create_answer(made, self.api_key)}


def detail(snapshot: Snapshot) -> dict[str, Any]:
    names = [snapshot.name] if snapshot.name else []
    return {"snapshotID": snapshot.pk.hex, "names": names}

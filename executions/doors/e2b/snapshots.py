"""Snapshots and forks of sandboxes: their files as they are, without memory and processes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.http import HttpResponse
from rest_framework.request import Request

from executions.doors.e2b import connect, tokens
from executions.doors.e2b.errors import invalid, told_of_control
from executions.doors.e2b.sandboxes import SandboxApiView, cursor_in, limit_in
from executions.doors.native.frame import answered_later
from executions.doors.native.rendering import json_response
from executions.kernel.text import is_storable
from executions.runs.requests import Conflict
from executions.sessions.lifecycle import is_without_network, opening
from executions.sessions.models import Session
from executions.sessions.requests import SessionRequest
from executions.sessions.storage import snapshots
from executions.sessions.storage.models import Snapshot
from executions.sessions.storage.snapshots import NoSuchSnapshot, SnapshotRequest
from providers.errors import SandboxError

# Each is a sandbox of its own, and all of them are waited for.
MOST_FORKS = 10


class TakeView(SandboxApiView):
    @answered_later
    async def post(self, request: Request, sandbox_id: str) -> HttpResponse:
        session = self.session(sandbox_id)
        name = self.body().get("name") or ""
        if not isinstance(name, str):
            raise invalid("name: Must be a string.")
        taken = await snapshots.taking(session, SnapshotRequest(name=name), self.caller())
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
        session_id = tokens.session_id_of(source) if source else None
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
        found = tokens.session_id_of(snapshot_id.partition(":")[0])
        if found is None:
            raise NoSuchSnapshot("There is no such snapshot.")
        snapshot = snapshots.snapshot_of(self.api_key.tenant, found)
        if not snapshots.remove(snapshot, self.by()):
            raise NoSuchSnapshot("There is no such snapshot.")
        return HttpResponse(status=204)


class ForkView(SandboxApiView):
    @answered_later
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
        taken = await snapshots.taking(session, SnapshotRequest(), self.caller())
        try:
            told = []
            for _ in range(count):
                told.append(await self._forked(session, taken, seconds, is_offline))
        finally:
            # Under a legal hold it stays. What was opened is told all the same.
            with suppress(Conflict):
                snapshots.remove(taken, self.by())
        return json_response(told, 201)

    async def _forked(
        self, session: Session, taken: Snapshot, seconds: int, is_offline: bool
    ) -> dict[str, Any]:
        wanted = SessionRequest(
            language=session.language,
            template=session.template,
            idle_seconds=seconds,
            max_seconds=seconds,
            env=dict(session.env or {}),
            metadata=dict(session.metadata or {}),
            offline=is_offline,
            **connect.from_snapshot(taken.pk),
        )
        try:
            made = await opening(wanted, self.caller())
        except SandboxError as error:
            return {"error": told_of_control(error)}
        return {"sandbox": connect.created(made, self.api_key)}


def detail(snapshot: Snapshot) -> dict[str, Any]:
    names = [snapshot.name] if snapshot.name else []
    return {"snapshotID": snapshot.pk.hex, "names": names}

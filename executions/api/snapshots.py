"""Snapshots of the files of sessions over the native API: parse, call a service, render."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404, HttpResponse
from django.urls import reverse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request

from executions.api import schema
from executions.api.base import answered_later
from executions.api.rendering import json_response, next_page
from executions.api.sessions import SESSION_ID, SessionApiView
from executions.kernel.coroutines import Waits
from executions.sessions.storage import snapshots
from executions.sessions.storage.models import Snapshot

TAGS = ["snapshots"]
SNAPSHOT_ID = OpenApiParameter("snapshot_id", OpenApiTypes.UUID, OpenApiParameter.PATH)


class SnapshotSerializer(serializers.Serializer[Any]):
    """The files of a session at one time, without its variables and processes."""

    id = serializers.CharField()
    name = serializers.CharField(allow_null=True)
    session = serializers.CharField(help_text="The session that the files are from.")
    files = serializers.IntegerField(help_text="The number of files, folders and links.")
    bytes = serializers.IntegerField()
    created_at = serializers.DateTimeField()


class SnapshotPageSerializer(serializers.Serializer[Any]):
    results = SnapshotSerializer(many=True)
    next = serializers.URLField(allow_null=True)


def snapshot_detail(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": str(snapshot.pk),
        "name": snapshot.name or None,
        "session": str(snapshot.source),
        "files": snapshot.files,
        "bytes": snapshot.bytes,
        "created_at": snapshot.created_at.isoformat(),
    }


class SessionSnapshotView(SessionApiView):
    @extend_schema(
        operation_id="take_snapshot",
        summary="Take a snapshot of the files of a session",
        description="Other sessions can start with these files: `POST /api/v1/sessions` with "
        "`from`. A snapshot has only files, folders and links, no variables, contexts or "
        "processes. It is kept after the session ends, until it is deleted.",
        tags=TAGS,
        parameters=[SESSION_ID],
        request=snapshots.TAKE,
        responses={
            201: SnapshotSerializer,
            **schema.errors(400, 401, 404, 409, 413, 415, 429, 502, 503),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID) -> Waits[HttpResponse]:
        session = self.session(session_id)
        wanted = snapshots.TAKE.read(request.data)
        snapshot = yield from snapshots.taking(session, wanted, self.caller())
        response = json_response(snapshot_detail(snapshot), 201)
        path = reverse("snapshot", args=[snapshot.pk])
        response["Location"] = request.build_absolute_uri(path)
        return response


class SnapshotsView(SessionApiView):
    @extend_schema(
        operation_id="list_snapshots",
        summary="List snapshots",
        description="The tenant's snapshots, newest first.",
        tags=TAGS,
        parameters=schema.parameters(snapshots.LIST),
        responses={200: SnapshotPageSerializer, **schema.errors(400, 401)},
    )
    def get(self, request: Request) -> HttpResponse:
        wanted = self.of(request, snapshots.LIST)
        page = snapshots.list_snapshots(self.api_key.tenant, wanted)
        results = [snapshot_detail(each) for each in page.snapshots]
        return json_response(
            {"results": results, "next": next_page(request, cursor=page.next_cursor)}
        )


class SnapshotView(SessionApiView):
    @extend_schema(
        operation_id="get_snapshot",
        summary="Get a snapshot",
        tags=TAGS,
        parameters=[SNAPSHOT_ID],
        responses={200: SnapshotSerializer, **schema.errors(401, 404)},
    )
    def get(self, request: Request, snapshot_id: UUID) -> HttpResponse:
        return json_response(
            snapshot_detail(snapshots.snapshot_of(self.api_key.tenant, snapshot_id))
        )

    @extend_schema(
        operation_id="delete_snapshot",
        summary="Delete a snapshot",
        description="Sessions that started with it keep their files. 409 if the tenant has a "
        "legal hold.",
        tags=TAGS,
        parameters=[SNAPSHOT_ID],
        responses={204: None, **schema.errors(401, 404, 409)},
    )
    def delete(self, request: Request, snapshot_id: UUID) -> HttpResponse:
        snapshot = snapshots.snapshot_of(self.api_key.tenant, snapshot_id)
        if not snapshots.remove(snapshot, self.by()):
            raise Http404
        return HttpResponse(status=204)

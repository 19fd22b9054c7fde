from __future__ import annotations

from django.urls import path, re_path

from executions.doors.agent_sandbox import (
    DownloadUrlView,
    ExecuteView,
    ListView,
    StopView,
    UploadUrlsView,
    UploadView,
)
from executions.doors.agent_sandbox import ResetView as AgentSandboxResetView
from executions.doors.e2b.frame import health
from executions.doors.e2b.urls import urlpatterns as e2b
from executions.doors.mcp.views import McpView
from executions.doors.native.admin_sandbox import ActiveView, ConfigView, ProvidersView, TestView
from executions.doors.native.downloads import signed_download, workspace_download
from executions.doors.native.executions import (
    ArtifactView,
    CancelView,
    EventsView,
    ExecutionsView,
    ExecutionView,
    LanguagesView,
    LedgerKeysView,
    NothingHereView,
    UsageView,
)
from executions.doors.native.session_files import (
    FileArchiveView,
    FileContentView,
    FileEventsView,
    FileMkdirView,
    FileMoveView,
    FilesView,
)
from executions.doors.native.sessions import (
    ContextRestartView,
    ContextsView,
    ContextView,
    InterruptView,
    ProcessesView,
    ProcessEventsView,
    ProcessResizeView,
    ProcessSignalView,
    ProcessStdinView,
    ResetView,
    SessionExecutionsView,
    SessionSnapshotView,
    SessionsView,
    SessionView,
    SnapshotsView,
    SnapshotView,
)
from executions.runs.extensions import installed

_SESSION = "api/v1/sessions/<uuid:session_id>"

urlpatterns = [
    path("api/v1/executions", ExecutionsView.as_view(), name="executions"),
    path("api/v1/executions/<uuid:execution_id>", ExecutionView.as_view(), name="execution"),
    path(
        "api/v1/executions/<uuid:execution_id>/cancel",
        CancelView.as_view(),
        name="execution-cancel",
    ),
    path(
        "api/v1/executions/<uuid:execution_id>/events",
        EventsView.as_view(),
        name="execution-events",
    ),
    path(
        "api/v1/executions/<uuid:execution_id>/artifacts/<path:name>",
        ArtifactView.as_view(),
        name="execution-artifact",
    ),
    *(endpoint for each in installed() for endpoint in each.urls()),
    path("api/v1/sessions", SessionsView.as_view(), name="sessions"),
    path(_SESSION, SessionView.as_view(), name="session"),
    path(f"{_SESSION}/executions", SessionExecutionsView.as_view(), name="session-executions"),
    path(f"{_SESSION}/interrupt", InterruptView.as_view(), name="session-interrupt"),
    path(f"{_SESSION}/reset", ResetView.as_view(), name="session-reset"),
    path(f"{_SESSION}/contexts", ContextsView.as_view(), name="session-contexts"),
    path(f"{_SESSION}/contexts/<str:context_id>", ContextView.as_view(), name="session-context"),
    path(
        f"{_SESSION}/contexts/<str:context_id>/restart",
        ContextRestartView.as_view(),
        name="session-context-restart",
    ),
    path(f"{_SESSION}/processes", ProcessesView.as_view(), name="session-processes"),
    path(
        f"{_SESSION}/processes/<int:pid>/stdin",
        ProcessStdinView.as_view(),
        name="session-process-stdin",
    ),
    path(
        f"{_SESSION}/processes/<int:pid>/signal",
        ProcessSignalView.as_view(),
        name="session-process-signal",
    ),
    path(
        f"{_SESSION}/processes/<int:pid>/events",
        ProcessEventsView.as_view(),
        name="session-process-events",
    ),
    path(
        f"{_SESSION}/processes/<int:pid>/resize",
        ProcessResizeView.as_view(),
        name="session-process-resize",
    ),
    path(f"{_SESSION}/files", FilesView.as_view(), name="session-files"),
    path(f"{_SESSION}/files/events", FileEventsView.as_view(), name="session-file-events"),
    path(f"{_SESSION}/files/content", FileContentView.as_view(), name="session-file-content"),
    path(f"{_SESSION}/files/move", FileMoveView.as_view(), name="session-file-move"),
    path(f"{_SESSION}/files/mkdir", FileMkdirView.as_view(), name="session-file-mkdir"),
    path(f"{_SESSION}/files/archive", FileArchiveView.as_view(), name="session-file-archive"),
    path(f"{_SESSION}/snapshot", SessionSnapshotView.as_view(), name="session-snapshot"),
    path("api/v1/snapshots", SnapshotsView.as_view(), name="snapshots"),
    path("api/v1/snapshots/<uuid:snapshot_id>", SnapshotView.as_view(), name="snapshot"),
    path("api/v1/languages", LanguagesView.as_view(), name="languages"),
    path("api/v1/usage", UsageView.as_view(), name="usage"),
    path("api/v1/ledger/keys", LedgerKeysView.as_view(), name="ledger-keys"),
    re_path(r"^api/v1(/[\s\S]*)?$", NothingHereView.as_view()),
    path("api/admin/sandbox/providers", ProvidersView.as_view(), name="admin-providers"),
    path("api/admin/sandbox/config", ConfigView.as_view(), name="admin-config"),
    path("api/admin/sandbox/test", TestView.as_view(), name="admin-test"),
    path("api/admin/sandbox/active", ActiveView.as_view(), name="admin-active"),
    path("v1/execute", ExecuteView.as_view(), name="agent-sandbox-execute"),
    path("v1/sandbox/reset", AgentSandboxResetView.as_view(), name="agent-sandbox-reset"),
    path("v1/sandbox/stop", StopView.as_view(), name="agent-sandbox-stop"),
    path("v1/files/upload", UploadView.as_view(), name="agent-sandbox-upload"),
    path("v1/files/upload-urls", UploadUrlsView.as_view(), name="agent-sandbox-upload-urls"),
    path("v1/files/list", ListView.as_view(), name="agent-sandbox-files"),
    path("v1/files/download-url", DownloadUrlView.as_view(), name="agent-sandbox-download-url"),
    path("health", health, name="agent-sandbox-health"),
    path("artifacts/<str:token>", signed_download, name="signed-artifact"),
    path("files/<str:token>", workspace_download, name="workspace-link"),
    path("mcp", McpView.as_view(), name="mcp"),
    *e2b,
]

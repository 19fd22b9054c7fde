"""Where E2B's clients find what. All of it is beside what is there otherwise, but `/health`."""

from __future__ import annotations

from django.urls import path, re_path, register_converter

from executions.doors.e2b.filesystem import FilesView, FilesystemView
from executions.doors.e2b.interpreter import (
    ContextRestartView,
    ContextsView,
    ContextView,
    ExecuteView,
)
from executions.doors.e2b.processes import ProcessView
from executions.doors.e2b.sandboxes import (
    ConnectView,
    ForkView,
    MetricsView,
    NetworkView,
    NotHereView,
    OneSandboxView,
    PauseView,
    SandboxesView,
    SnapshotsView,
    SnapshotView,
    TakeView,
    TimeoutView,
)
from executions.doors.e2b.secrets import OneSecretView, SecretsView
from executions.doors.e2b.templates import (
    AliasView,
    BuildView,
    StatusView,
    TagsView,
    TemplatesView,
    TemplateTagsView,
    TemplateView,
    upload,
)
from executions.doors.e2b.templates import (
    FilesView as TemplateFilesView,
)


class SnapshotId:
    """The id of a snapshot, with or without a tag. Those of E2B's templates are shorter."""

    regex = "[0-9a-f]{32}(?::[a-z]+)?"

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: object) -> str:
        return str(value).replace("-", "")


register_converter(SnapshotId, "e2b_snapshot")

_PROCESS = ProcessView.as_view()
_ONE = "sandboxes/<str:sandbox_id>"
_NOT_HERE = (
    "templates|v2/templates|v3/templates|default-templates|volumes|teams|snapshots"
    "|sandboxes/[^/]+/[a-z]+|v2/sandboxes/[^/]+/[a-z]+"
)

urlpatterns = [
    path("sandboxes", SandboxesView.as_view(), name="e2b-sandboxes"),
    path("v2/sandboxes", SandboxesView.as_view(), name="e2b-sandboxes-2"),
    path(_ONE, OneSandboxView.as_view(), name="e2b-sandbox"),
    path(f"{_ONE}/connect", ConnectView.as_view(), name="e2b-connect"),
    path(f"v2/{_ONE}/connect", ConnectView.as_view(), name="e2b-connect-2"),
    path(f"{_ONE}/resume", ConnectView.as_view(), name="e2b-resume"),
    path(f"{_ONE}/timeout", TimeoutView.as_view(), name="e2b-timeout"),
    path(f"{_ONE}/pause", PauseView.as_view(), name="e2b-pause"),
    path(f"{_ONE}/network", NetworkView.as_view(), name="e2b-network"),
    path(f"{_ONE}/metrics", MetricsView.as_view(), name="e2b-metrics"),
    path(f"{_ONE}/snapshots", TakeView.as_view(), name="e2b-snapshot-take"),
    path(f"{_ONE}/fork", ForkView.as_view(), name="e2b-fork"),
    path("secrets", SecretsView.as_view(), name="e2b-secrets"),
    path("secrets/<str:secret>", OneSecretView.as_view(), name="e2b-secret"),
    path("snapshots", SnapshotsView.as_view(), name="e2b-snapshots"),
    # To clients a snapshot is a template.
    path("templates/<e2b_snapshot:snapshot_id>", SnapshotView.as_view(), name="e2b-snapshot"),
    path("templates", TemplatesView.as_view(), name="e2b-templates"),
    path("v2/templates", TemplatesView.as_view(), name="e2b-templates-2"),
    path("v3/templates", TemplatesView.as_view(), name="e2b-templates-3"),
    path("templates/tags", TagsView.as_view(), name="e2b-template-tags"),
    path("templates/uploads/<str:token>", upload, name="e2b-template-upload"),
    path("templates/aliases/<str:alias>", AliasView.as_view(), name="e2b-template-alias"),
    path("templates/<str:template>", TemplateView.as_view(), name="e2b-template"),
    path(
        "templates/<str:template>/tags",
        TemplateTagsView.as_view(),
        name="e2b-template-tags-of",
    ),
    path(
        "templates/<str:template>/files/<str:digest>",
        TemplateFilesView.as_view(),
        name="e2b-template-files",
    ),
    path(
        "templates/<str:template>/builds/<uuid:build_id>/status",
        StatusView.as_view(),
        name="e2b-template-status",
    ),
    path(
        "v2/templates/<str:template>/builds/<uuid:build_id>",
        BuildView.as_view(),
        name="e2b-template-build",
    ),
    # What only looks takes another scope.
    path("process.Process/List", _PROCESS, {"method": "List"}, name="e2b-process-list"),
    path("process.Process/Connect", _PROCESS, {"method": "Connect"}, name="e2b-process-connect"),
    path("process.Process/<str:method>", _PROCESS, name="e2b-process"),
    path("filesystem.Filesystem/<str:method>", FilesystemView.as_view(), name="e2b-filesystem"),
    path("files", FilesView.as_view(), name="e2b-files"),
    path("execute", ExecuteView.as_view(), name="e2b-execute"),
    path("contexts", ContextsView.as_view(), name="e2b-contexts"),
    path("contexts/<str:context_id>", ContextView.as_view(), name="e2b-context"),
    path(
        "contexts/<str:context_id>/restart",
        ContextRestartView.as_view(),
        name="e2b-context-restart",
    ),
    re_path(rf"^(?:{_NOT_HERE})(?:/.*)?$", NotHereView.as_view()),
]

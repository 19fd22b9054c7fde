from django.urls import path, re_path

from executions.api.admin_sandbox import ActiveView, ConfigView, ProvidersView, TestView
from executions.api.agent_sandbox import AgentSandboxExecuteView
from executions.api.files import signed_download
from executions.api.ledger import LedgerKeysView
from executions.api.views import (
    ArtifactView,
    ExecutionsView,
    ExecutionView,
    LanguagesView,
    NothingHereView,
)

urlpatterns = [
    path("api/v1/executions", ExecutionsView.as_view(), name="executions"),
    path("api/v1/executions/<uuid:execution_id>", ExecutionView.as_view(), name="execution"),
    path(
        "api/v1/executions/<uuid:execution_id>/artifacts/<path:name>",
        ArtifactView.as_view(),
        name="execution-artifact",
    ),
    path("api/v1/languages", LanguagesView.as_view(), name="languages"),
    path("api/v1/ledger/keys", LedgerKeysView.as_view(), name="ledger-keys"),
    re_path(r"^api/v1(/.*)?$", NothingHereView.as_view()),
    path("api/admin/sandbox/providers", ProvidersView.as_view(), name="admin-providers"),
    path("api/admin/sandbox/config", ConfigView.as_view(), name="admin-config"),
    path("api/admin/sandbox/test", TestView.as_view(), name="admin-test"),
    path("api/admin/sandbox/active", ActiveView.as_view(), name="admin-active"),
    path("v1/execute", AgentSandboxExecuteView.as_view(), name="agent-sandbox-execute"),
    path("artifacts/<str:token>", signed_download, name="signed-artifact"),
]

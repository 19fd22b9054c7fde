from __future__ import annotations

from executions.capabilities.alerts.models import Alert, AlertDelivery
from executions.capabilities.network.models import (
    NetworkAttempt,
    NetworkCredential,
    NetworkList,
)
from executions.capabilities.observability.models import AuditExport
from executions.capabilities.policies.models import Policy
from executions.capabilities.reports.models import Report
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.search.models import CodeSearchProgress, CodeText, SavedFilter
from executions.capabilities.spending.models import Budget, Spending, SpendingAlert
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.threads.models import Thread
from executions.capabilities.tools.models import ToolCall
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.ledger.models import LedgerCheck, LedgerEntry, LegalHold
from executions.runs.models import (
    Approval,
    Artifact,
    Execution,
    ExecutionEvent,
    LateResult,
    Process,
    RunSignal,
)
from executions.runs.statistics import Statistic
from executions.sessions.models import (
    Blob,
    LooseFile,
    Session,
    Snapshot,
    StoredTotal,
    Workspace,
    WorkspaceFile,
)
from executions.tenants.models import ApiKey, KeyRefusal, RequestWindow, Scope, Tenant

__all__ = (
    "Alert",
    "AlertDelivery",
    "ApiKey",
    "Approval",
    "Artifact",
    "AuditExport",
    "Blob",
    "Budget",
    "CodeSearchProgress",
    "CodeText",
    "Execution",
    "ExecutionEvent",
    "KeyRefusal",
    "LateResult",
    "LedgerCheck",
    "LedgerEntry",
    "LegalHold",
    "LooseFile",
    "NetworkAttempt",
    "NetworkCredential",
    "NetworkList",
    "Policy",
    "Process",
    "Report",
    "RequestWindow",
    "RunSignal",
    "SavedFilter",
    "Schedule",
    "Scope",
    "Session",
    "Snapshot",
    "Spending",
    "SpendingAlert",
    "Statistic",
    "StoredTotal",
    "Template",
    "TemplateVersion",
    "Tenant",
    "Thread",
    "ToolCall",
    "WebhookDelivery",
    "WebhookSecret",
    "Workspace",
    "WorkspaceFile",
)

from executions.ledger.models import LedgerCheck, LedgerEntry
from executions.models.alert import Alert
from executions.models.approval import Approval
from executions.models.audit_export import AuditExport
from executions.models.code_text import CodeSearchProgress, CodeText
from executions.models.legal_hold import LegalHold
from executions.models.policy import Policy
from executions.models.report import Report
from executions.models.saved_filter import SavedFilter
from executions.models.schedule import Schedule
from executions.models.spending import Budget, Spending, SpendingAlert
from executions.models.statistic import (
    ExecutionCount,
    ExecutionLatency,
    ExecutionTenantCount,
    ExecutionTotal,
)
from executions.models.tool_call import ToolCall
from executions.models.webhook import WebhookDelivery, WebhookSecret
from executions.runs.models import Artifact, Execution, ExecutionEvent, LateResult
from executions.runs.process_models import Process
from executions.runs.signal_models import RunSignal
from executions.sessions.models import Session
from executions.sessions.storage.models import (
    Blob,
    LooseFile,
    Snapshot,
    StoredTotal,
    Workspace,
    WorkspaceFile,
)
from executions.tenants.models import ApiKey, KeyRefusal, RequestWindow, Scope, Tenant

__all__ = (
    "Alert",
    "ApiKey",
    "Approval",
    "Artifact",
    "AuditExport",
    "Blob",
    "Budget",
    "CodeSearchProgress",
    "CodeText",
    "Execution",
    "ExecutionCount",
    "ExecutionEvent",
    "ExecutionLatency",
    "ExecutionTenantCount",
    "ExecutionTotal",
    "KeyRefusal",
    "LateResult",
    "LedgerCheck",
    "LedgerEntry",
    "LegalHold",
    "LooseFile",
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
    "StoredTotal",
    "Tenant",
    "ToolCall",
    "WebhookDelivery",
    "WebhookSecret",
    "Workspace",
    "WorkspaceFile",
)

from executions.admin.alert import AlertAdmin, AuditExportAdmin
from executions.admin.api_key import ApiKeyAdmin
from executions.admin.approval import ApprovalAdmin
from executions.admin.execution import ExecutionAdmin
from executions.admin.ledger_check import LedgerCheckAdmin
from executions.admin.ledger_entry import LedgerEntryAdmin
from executions.admin.legal_hold import LegalHoldAdmin
from executions.admin.policy import PolicyAdmin
from executions.admin.process import ProcessAdmin
from executions.admin.report import ReportAdmin
from executions.admin.route import TenantRouteAdmin
from executions.admin.schedule import ScheduleAdmin
from executions.admin.session import SessionAdmin
from executions.admin.snapshot import SnapshotAdmin
from executions.admin.spending import BudgetAdmin, SpendingAdmin, SpendingAlertAdmin
from executions.admin.tenant import TenantAdmin
from executions.admin.tool_call import ToolCallAdmin
from executions.admin.webhook import WebhookDeliveryAdmin, WebhookSecretAdmin

__all__ = (
    "AlertAdmin",
    "ApiKeyAdmin",
    "ApprovalAdmin",
    "AuditExportAdmin",
    "BudgetAdmin",
    "ExecutionAdmin",
    "LedgerCheckAdmin",
    "LedgerEntryAdmin",
    "LegalHoldAdmin",
    "PolicyAdmin",
    "ProcessAdmin",
    "ReportAdmin",
    "ScheduleAdmin",
    "SessionAdmin",
    "SnapshotAdmin",
    "SpendingAdmin",
    "SpendingAlertAdmin",
    "TenantAdmin",
    "TenantRouteAdmin",
    "ToolCallAdmin",
    "WebhookDeliveryAdmin",
    "WebhookSecretAdmin",
)

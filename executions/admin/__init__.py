from executions.admin.api_key import ApiKeyAdmin
from executions.admin.execution import ExecutionAdmin
from executions.admin.ledger_check import LedgerCheckAdmin
from executions.admin.ledger_entry import LedgerEntryAdmin
from executions.admin.process import ProcessAdmin
from executions.admin.route import TenantRouteAdmin
from executions.admin.session import SessionAdmin
from executions.admin.snapshot import SnapshotAdmin
from executions.admin.tenant import TenantAdmin
from executions.capabilities.alerts.admin import AlertAdmin, AuditExportAdmin
from executions.capabilities.policies.admin import PolicyAdmin
from executions.capabilities.policies.approval_admin import ApprovalAdmin
from executions.capabilities.reports.admin import ReportAdmin
from executions.capabilities.retention.admin import LegalHoldAdmin
from executions.capabilities.schedules.admin import ScheduleAdmin
from executions.capabilities.spending.admin import BudgetAdmin, SpendingAdmin, SpendingAlertAdmin
from executions.capabilities.tools.admin import ToolCallAdmin
from executions.capabilities.webhooks.admin import WebhookDeliveryAdmin, WebhookSecretAdmin

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

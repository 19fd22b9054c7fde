"""All pages of the admin: a capability brings its own. Loading this module registers them."""

from executions.admin.executions import ExecutionAdmin
from executions.admin.files import SnapshotAdmin
from executions.admin.keys import ApiKeyAdmin
from executions.admin.ledger import LedgerCheckAdmin, LedgerEntryAdmin
from executions.admin.sessions import SessionAdmin
from executions.admin.tenants import ProcessAdmin, TenantAdmin, TenantRouteAdmin
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

from executions.admin.api_key import ApiKeyAdmin
from executions.admin.execution import ExecutionAdmin
from executions.admin.ledger_entry import LedgerEntryAdmin
from executions.admin.tenant import TenantAdmin

__all__ = ("ApiKeyAdmin", "ExecutionAdmin", "LedgerEntryAdmin", "TenantAdmin")

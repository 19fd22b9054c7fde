from executions.models.api_key import ApiKey
from executions.models.artifact import Artifact
from executions.models.code_text import CodeSearchProgress, CodeText
from executions.models.execution import Execution
from executions.models.ledger_entry import LedgerEntry
from executions.models.saved_filter import SavedFilter
from executions.models.spending import Budget, Spending, SpendingAlert
from executions.models.statistic import ExecutionCount, ExecutionLatency, ExecutionTenantCount
from executions.models.tenant import Tenant

__all__ = (
    "ApiKey",
    "Artifact",
    "Budget",
    "CodeSearchProgress",
    "CodeText",
    "Execution",
    "ExecutionCount",
    "ExecutionLatency",
    "ExecutionTenantCount",
    "LedgerEntry",
    "SavedFilter",
    "Spending",
    "SpendingAlert",
    "Tenant",
)

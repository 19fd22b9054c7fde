from executions.admin.api_key import ApiKeyAdmin
from executions.admin.execution import ExecutionAdmin
from executions.admin.tenant import TenantAdmin

__all__ = ("ApiKeyAdmin", "ExecutionAdmin", "TenantAdmin")

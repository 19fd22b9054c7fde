from executions.models.api_key import ApiKey
from executions.models.artifact import Artifact
from executions.models.execution import Execution
from executions.models.statistic import ExecutionCount, ExecutionLatency, ExecutionTenantCount
from executions.models.tenant import Tenant

__all__ = (
    "ApiKey",
    "Artifact",
    "Execution",
    "ExecutionCount",
    "ExecutionLatency",
    "ExecutionTenantCount",
    "Tenant",
)

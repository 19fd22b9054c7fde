from executions.models.api_key import ApiKey
from executions.models.artifact import Artifact
from executions.models.execution import Execution
from executions.models.spending import Budget, Spending, SpendingAlert
from executions.models.tenant import Tenant

__all__ = ("ApiKey", "Artifact", "Budget", "Execution", "Spending", "SpendingAlert", "Tenant")

"""All pages of the admin: a capability brings its own. Loading this module registers them."""

from importlib import import_module

from executions.admin.executions import ExecutionAdmin
from executions.admin.files import SnapshotAdmin
from executions.admin.keys import ApiKeyAdmin
from executions.admin.ledger import LedgerCheckAdmin, LedgerEntryAdmin
from executions.admin.sessions import SessionAdmin
from executions.admin.tenants import ProcessAdmin, TenantAdmin, TenantRouteAdmin
from executions.runs.extensions import installed

__all__ = (
    "ApiKeyAdmin",
    "ExecutionAdmin",
    "LedgerCheckAdmin",
    "LedgerEntryAdmin",
    "ProcessAdmin",
    "SessionAdmin",
    "SnapshotAdmin",
    "TenantAdmin",
    "TenantRouteAdmin",
)

for extension in installed():
    for module in extension.pages:
        import_module(module)

"""Webhooks as a capability: the end of a run is told to the address in its request."""

from __future__ import annotations

from collections.abc import Callable

from executions.capabilities.webhooks import service as webhooks
from executions.capabilities.webhooks.service import send_in_background
from executions.runs.extensions import Extension
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from executions.tenants.models import Tenant


class Webhooks(Extension):
    pages = ("executions.capabilities.webhooks.admin",)
    tasks = {"executions.tasks.tend_webhooks": 1}
    fields = ("webhook",)

    def ensure_accepted(self, request: ExecutionRequest, tenant: Tenant) -> None:
        if request.webhook is not None:
            webhooks.ensure_signing_secret(tenant)

    def on_insert(self, execution: Execution, request: ExecutionRequest) -> None:
        if request.webhook is not None and execution.tenant is not None:
            webhooks.expect_end(execution, execution.tenant, request.webhook)

    def before_seal(self, ended: Execution, *, had_code: bool) -> None:
        if ended.mode == Execution.Mode.ASYNC:
            webhooks.come_due(ended.pk)

    def start_worker(self, goes_on: Callable[[], bool]) -> None:
        send_in_background(goes_on)


CAPABILITY = Webhooks()

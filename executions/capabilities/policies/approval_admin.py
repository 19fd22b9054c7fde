"""The pages of approvals: what waits, exactly, and the decision about it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin

from executions.capabilities.policies.admin import DecidedByHand
from executions.capabilities.policies.approvals import decide, request_of
from executions.kernel.text import to_json
from executions.runs.models import Approval
from executions.runs.record import file_facts
from executions.runs.requests import ExecutionRequest
from executions.runs.tool_schemas import stored
from providers.errors import SandboxError
from providers.fields import DecryptionError
from providers.hidden_characters import visible


@admin.register(Approval)
class ApprovalAdmin(DecidedByHand):
    change_form_template = "admin/executions/approval/change_form.html"
    list_display = ("execution_id", "tenant_slug", "state", "asked_at", "decided_by", "decided_at")
    list_filter = ("status",)
    fields = (
        *("execution", "tenant_slug", "state", "asked_at", "decided_by", "decided_at"),
        *("code_hash", "request_hash"),
    )
    hash_field = "request_hash"
    of_execution = ("status", "finished_at")

    def shown(self, row: Approval) -> dict[str, Any]:
        return _shown(row) if row.status == Approval.Status.WAITING else {}

    def decide(self, row: Approval, person: Any, *, approve: bool, shown_hash: str) -> str:
        decide(row, person, approve=approve, request_hash=shown_hash)
        return f"Execution {row.execution_id} {'approved' if approve else 'rejected'}."

    @admin.display(description="status")
    def state(self, approval: Approval) -> str:
        waits = approval.status == Approval.Status.WAITING
        if waits and not approval.execution.is_open:
            return f"undecided; execution {approval.execution.get_status_display()}"
        return approval.get_status_display()


def _shown(approval: Approval) -> dict[str, Any]:
    """All of what would be run, with what cannot be seen spelled out."""
    try:
        wanted = request_of(approval)
    except SandboxError as error:
        return {"problem": error.message}
    except DecryptionError as error:
        return {"problem": f"The request cannot be read. {error}"}
    if wanted is None:
        return {"problem": "The execution has ended, or differs from the request. It will not run."}
    findings = [
        (each.get("line"), each.get("kind"), visible(str(each.get("name"))))
        for each in approval.findings
    ]
    return {"wanted": _parts(wanted), "code": visible(wanted.code), "findings": findings}


def _parts(wanted: ExecutionRequest) -> list[tuple[str, str]]:
    parts = {
        "Language": wanted.language,
        "Entrypoint": wanted.entrypoint,
        "Timeout": "" if wanted.timeout is None else f"{wanted.timeout:g} s",
        "Not before": "" if wanted.run_at is None else wanted.run_at.isoformat(),
        "Session": f"{wanted.session} {wanted.context}" if wanted.session else "",
        "Provider": wanted.provider,
        "Tools": to_json(stored(wanted.tools)) if wanted.tools else "",
        "Subject": wanted.subject,
        "Arguments": wanted.arguments_json,
        # Its values may be secrets, and are shown to nobody.
        "Environment variables": " ".join(sorted(wanted.env)),
        "Files": to_json([file_facts(file) for file in wanted.files]) if wanted.files else "",
    }
    return [(name, visible(value)) for name, value in parts.items() if value]

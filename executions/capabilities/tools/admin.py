"""Calls of tools: those that are held until somebody approves them, exactly, and all others."""

from __future__ import annotations

from typing import Any

from django.contrib import admin

from executions.admin.frame import DecidedByHand
from executions.capabilities.tools.calls import decide, is_entered, look_now
from executions.capabilities.tools.models import ToolCall
from providers.hidden_characters import visible


@admin.register(ToolCall)
class ToolCallAdmin(DecidedByHand):
    change_form_template = "admin/executions/toolcall/change_form.html"
    list_display = ("name", "tenant_slug", "shown_state", "asked_at", "decided_by", "answered_by")
    list_filter = ("state", "writes")
    fields = (
        *("execution", "tenant_slug", "name", "writes", "shown_state", "asked_at"),
        *("decided_by", "decided_at", "answered_by", "answered_at", "arguments_hash"),
    )
    hash_field = "arguments_hash"
    of_execution = ("finished_at",)

    def shown(self, row: ToolCall) -> dict[str, Any]:
        waits = row.state == ToolCall.State.HELD and not row.execution.finished_at
        return {
            "arguments": visible(row.arguments),
            "answer": visible(row.answer),
            "waits": waits,
            # What is shown is what would be approved.
            "is_altered": waits and not is_entered(row),
        }

    def decide(self, row: ToolCall, person: Any, *, approve: bool, shown_hash: str) -> str:
        decide(row, person, approve=approve, arguments_hash=shown_hash)
        look_now()
        return f"Call of {row.name} {'approved' if approve else 'rejected'}."

    @admin.display(description="status")
    def shown_state(self, call: ToolCall) -> str:
        if call.state in ToolCall.OPEN and call.execution.finished_at is not None:
            return "Run ended"
        return call.get_state_display()

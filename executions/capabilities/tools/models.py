from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from executions.kernel.text import uuid7
from executions.runs.models import Execution


class ToolCall(models.Model):
    """A call that running code makes of a tool of its caller's, and what it was answered.

    The row is how an answer that another process was given reaches the one that runs the code.
    Whoever could write it must not answer by that: `entry` is the ledger's of its last step, and
    nothing is handed on that it does not say.
    """

    class State(models.TextChoices):
        HELD = "held", "Pending approval"
        WAITING = "waiting", "Waiting for the result"
        ANSWERED = "answered", "Answered"
        REFUSED = "refused", "Rejected"
        GIVEN_UP = "given_up", "Abandoned"

    OPEN = (State.HELD, State.WAITING)

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    execution = models.ForeignKey(Execution, on_delete=models.CASCADE, related_name="tool_calls")
    tenant_slug = models.CharField("tenant", max_length=64)
    name = models.CharField(max_length=64)
    arguments = models.TextField(help_text="JSON, as the code passed them.")
    arguments_hash = models.CharField(max_length=71)
    writes = models.BooleanField("requires approval")
    state = models.CharField(max_length=8, choices=State.choices)
    answer = models.TextField(blank=True, help_text="JSON: a result or an error.")
    asked_at = models.DateTimeField("requested at", default=timezone.now, editable=False)
    decided_by = models.CharField(max_length=200, blank=True)
    decided_at = models.DateTimeField(null=True)
    answered_by = models.CharField(max_length=200, blank=True)
    answered_at = models.DateTimeField(null=True)
    entry = models.BigIntegerField(default=0, help_text="Ledger entry of the last step.")

    class Meta:
        ordering = ("-id",)
        default_permissions = ("view",)
        indexes = (
            models.Index(
                fields=("execution",),
                name="tool_call_open",
                condition=Q(state__in=("held", "waiting")),
            ),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(state__in=("held", "waiting", "answered", "refused", "given_up")),
                name="tool_call_state_is_known",
            ),
            models.CheckConstraint(
                condition=~Q(state="held") | Q(writes=True), name="tool_call_held_writes"
            ),
            models.CheckConstraint(
                condition=~Q(state="answered")
                | (Q(answered_at__isnull=False) & ~Q(answered_by="")),
                name="tool_call_answered_by_somebody",
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} of {self.execution_id}"

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from executions.kernel.text import uuid7
from executions.runs.models import Process
from executions.tenants.models import ApiKey, Tenant
from providers.fields import EncryptedJSONField, EncryptedTextField


class Session(models.Model):
    """A persistent sandbox of one caller, reachable through every process of the service.

    This row is the truth about it; the provider only has the sandbox. Tenant and key are kept as
    text too, because the record outlives them. Times are the database's, by which its ages are
    measured as well.
    """

    class State(models.TextChoices):
        OPEN = "open", "Open"
        ASLEEP = "asleep", "Asleep"
        CLOSED = "closed", "Closed"
        LOST = "lost", "Lost"

    LIVING = (State.OPEN, State.ASLEEP)

    class Saves(models.TextChoices):
        ANSWER = "answer", "Before the response"
        BACKGROUND = "background", "After the response"
        NEVER = "never", "Never"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)

    tenant = models.ForeignKey(
        Tenant, on_delete=models.SET_NULL, null=True, related_name="sessions", db_index=False
    )
    tenant_slug = models.CharField(max_length=64)
    api_key = models.ForeignKey(
        ApiKey, on_delete=models.SET_NULL, null=True, related_name="sessions", db_index=False
    )
    api_key_name = models.CharField(max_length=100, blank=True)
    api_key_prefix = models.CharField(max_length=16, blank=True)
    subject = models.CharField(
        max_length=255, blank=True, help_text="The end user for whom the caller opened it."
    )
    name = models.CharField(max_length=128, blank=True, help_text="Unique while open.")
    metadata = models.JSONField(default=dict, help_text="Set by the caller.")

    language = models.CharField(max_length=32)
    template = models.CharField(max_length=64, blank=True)
    env = EncryptedJSONField(null=True, editable=False, help_text="Environment variables.")

    provider = models.CharField(max_length=64, blank=True)
    config_version = models.PositiveIntegerField(
        null=True, help_text="Version of the provider configuration it uses."
    )
    ref = EncryptedTextField(
        null=True,
        editable=False,
        help_text="The provider's name for the sandbox. Null while the session opens or sleeps.",
    )
    runtime = models.CharField(max_length=64, blank=True, help_text="Runtime that isolates it.")
    isolation = models.CharField(max_length=16, blank=True)
    sharing = models.CharField(max_length=16, blank=True)

    state = models.CharField(max_length=8, choices=State.choices, default=State.OPEN)
    contexts = models.JSONField(
        default=list, help_text="Interpreters: id, language and working directory of each."
    )
    turns = models.PositiveBigIntegerField(default=0, help_text="Number of executions requested.")
    conversation = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="Hash of the caller's conversation id. Unique while open.",
    )
    saves = models.CharField(
        max_length=10,
        choices=Saves.choices,
        default=Saves.BACKGROUND,
        db_default=Saves.BACKGROUND,
        help_text="When files are saved.",
    )
    touched = models.PositiveBigIntegerField(
        default=0, db_default=0, help_text="Number of starts and ends in the session."
    )
    unsaved_since = models.DateTimeField(
        null=True, editable=False, help_text="Files may have unsaved changes since this time."
    )
    wakes = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Number of wake-ups; each gets a new sandbox."
    )
    woken_at = models.DateTimeField(null=True, editable=False)
    woken_turn = models.PositiveBigIntegerField(
        null=True, help_text="First execution after the last wake-up."
    )
    waking_since = models.DateTimeField(
        null=True, editable=False, help_text="Wake-up in progress since."
    )
    process = models.ForeignKey(
        Process,
        on_delete=models.SET_NULL,
        null=True,
        editable=False,
        related_name="sessions",
        db_index=False,
        help_text="Process that opens or wakes it.",
    )
    idle_seconds = models.PositiveIntegerField(
        default=600,
        help_text="Idle timeout in seconds. Then it sleeps, or closes if files are not saved.",
    )
    max_seconds = models.PositiveIntegerField(
        default=1800, help_text="Maximum lifetime in seconds."
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    used_at = models.DateTimeField(db_default=Now(), editable=False)
    closed_at = models.DateTimeField(null=True, editable=False)
    closed_because = models.CharField(max_length=255, blank=True)
    released_at = models.DateTimeField(
        null=True,
        editable=False,
        help_text="When the provider confirmed that the sandbox is gone.",
    )

    class Meta:
        ordering = ("-id",)
        permissions = (("operate_session", "Can close, reset and extend sessions"),)
        indexes = (
            models.Index(fields=("tenant", "-id"), name="session_tenant_id"),
            # Caps, ages and leases are counted from it.
            models.Index(
                fields=("tenant_slug", "used_at"),
                name="session_living",
                condition=Q(closed_at=None),
            ),
            # Those before the open one: what is kept of them is the conversation's.
            models.Index(
                fields=("tenant", "conversation", "-id"),
                name="session_of_conversation",
                condition=~Q(conversation=""),
            ),
            # What an ended process has begun is found in it.
            models.Index(
                fields=("process",),
                name="session_process",
                condition=Q(process__isnull=False),
            ),
            models.Index(
                fields=("unsaved_since",),
                name="session_to_save",
                condition=Q(closed_at=None, unsaved_since__isnull=False),
            ),
            models.Index(
                fields=("id",),
                name="session_to_release",
                condition=Q(closed_at__isnull=False, released_at=None),
            ),
        )
        constraints = (
            models.UniqueConstraint(
                fields=("tenant", "name"),
                condition=Q(closed_at=None) & ~Q(name=""),
                name="session_name_once_per_tenant_while_open",
            ),
            models.UniqueConstraint(
                fields=("tenant", "conversation"),
                condition=Q(closed_at=None) & ~Q(conversation=""),
                name="session_conversation_once_per_tenant",
            ),
            models.CheckConstraint(
                condition=Q(saves__in=("answer", "background", "never")),
                name="session_saves_is_known",
            ),
            models.CheckConstraint(
                condition=Q(state__in=("open", "asleep"), closed_at=None)
                | Q(state__in=("closed", "lost"), closed_at__isnull=False),
                name="session_state_is_known_and_closed_has_a_time",
            ),
            models.CheckConstraint(
                condition=Q(idle_seconds__gt=0, max_seconds__gt=0),
                name="session_ages_are_positive",
            ),
        )

    def __str__(self) -> str:
        # Not the name, which its caller chose: pages show this as it is.
        return str(self.pk)

    @property
    def is_living(self) -> bool:
        return self.state in self.LIVING

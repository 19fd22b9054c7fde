from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from executions.ids import uuid7
from executions.models.api_key import ApiKey
from executions.models.process import Process
from executions.models.tenant import Tenant
from providers.fields import EncryptedJSONField, EncryptedTextField


class Session(models.Model):
    """A sandbox that stays for one caller, whatever process of ours is asked for it next.

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
        ANSWER = "answer", "Before the answer"
        BACKGROUND = "background", "Behind the answer"
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
        max_length=255, blank=True, help_text="Whom the caller opened it for."
    )
    name = models.CharField(max_length=128, blank=True, help_text="Unique while it is open.")
    metadata = models.JSONField(default=dict, help_text="The caller's own.")

    language = models.CharField(max_length=32)
    template = models.CharField(max_length=64, blank=True)
    env = EncryptedJSONField(
        null=True, editable=False, help_text="The environment of all that runs in it."
    )

    provider = models.CharField(max_length=64, blank=True)
    config_version = models.PositiveIntegerField(
        null=True, help_text="Of its provider's configuration, which it keeps."
    )
    ref = EncryptedTextField(
        null=True,
        editable=False,
        help_text="What its sandbox is called at the provider, where that opens it. "
        "Null while it is being opened, and while it is asleep.",
    )
    runtime = models.CharField(max_length=64, blank=True, help_text="The tool that isolates.")
    isolation = models.CharField(max_length=16, blank=True)
    sharing = models.CharField(max_length=16, blank=True)

    state = models.CharField(max_length=8, choices=State.choices, default=State.OPEN)
    contexts = models.JSONField(
        default=list, help_text="Its interpreters: id, language and folder of each."
    )
    turns = models.PositiveBigIntegerField(
        default=0, help_text="How many executions it was asked for: each has one of the numbers."
    )
    conversation = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="The hash of what its caller calls it by. Unique while it is open.",
    )
    saves = models.CharField(
        max_length=10,
        choices=Saves.choices,
        default=Saves.BACKGROUND,
        db_default=Saves.BACKGROUND,
        help_text="When its files are saved.",
    )
    touched = models.PositiveBigIntegerField(
        default=0, db_default=0, help_text="How often something began or ended in it."
    )
    unsaved_since = models.DateTimeField(
        null=True, editable=False, help_text="Since then its files may differ from what is saved."
    )
    wakes = models.PositiveIntegerField(
        default=0, db_default=0, help_text="How often it was woken: each has a sandbox of its own."
    )
    woken_at = models.DateTimeField(null=True, editable=False)
    woken_turn = models.PositiveBigIntegerField(
        null=True, help_text="The first execution after it was woken last."
    )
    waking_since = models.DateTimeField(
        null=True, editable=False, help_text="Since then somebody wakes it."
    )
    process = models.ForeignKey(
        Process,
        on_delete=models.SET_NULL,
        null=True,
        editable=False,
        related_name="sessions",
        db_index=False,
        help_text="Who opens or wakes it now.",
    )
    idle_seconds = models.PositiveIntegerField(
        default=600,
        help_text="Unused for so long, it goes to sleep; or is closed, where nothing is saved.",
    )
    max_seconds = models.PositiveIntegerField(
        default=1800, help_text="So long after it was opened, it is closed."
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    used_at = models.DateTimeField(db_default=Now(), editable=False)
    closed_at = models.DateTimeField(null=True, editable=False)
    closed_because = models.CharField(max_length=255, blank=True)
    released_at = models.DateTimeField(
        null=True,
        editable=False,
        help_text="When its provider said that nothing is left of its sandbox.",
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

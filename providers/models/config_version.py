"""What a provider's configuration was, is, and is asked to become."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from providers.fields import EncryptedJSONField
from providers.models.announced import AnnouncedQuerySet


class ConfigVersion(models.Model):
    """One version of a provider's configuration: never changed, and kept when the provider goes.

    `content` holds `config` and a random `salt`; `content_hash` is the SHA-256 of both and of the
    version's name, so that it proves the content and lets nobody guess a short secret from it.
    `diff` is against the version before, with secrets masked. Removing a provider is a version
    too, with an empty configuration.
    """

    provider_id = models.CharField("provider", max_length=64)
    version = models.PositiveIntegerField()
    content = EncryptedJSONField(editable=False)
    content_hash = models.CharField(max_length=71)
    author = models.CharField(max_length=200)
    approved_by = models.CharField(max_length=200, blank=True)
    reason = models.CharField(max_length=500, blank=True)
    diff = models.JSONField(default=list)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        verbose_name = "configuration version"
        ordering = ("-id",)
        constraints = (
            models.UniqueConstraint(
                fields=("provider_id", "version"), name="providers_version_is_unique"
            ),
        )

    def __str__(self) -> str:
        return f"{self.provider_id} version {self.version}"


class PendingChange(models.Model):
    """A change that waits for a second administrator, under the two-person rule.

    `config` is complete and validated, null where only `action` matters. Who asked for it can
    never decide in its favour, which the database enforces.
    """

    class Action(models.TextChoices):
        SAVE = "save", "Save"
        ACTIVATE = "activate", "Activate"
        SAVE_AND_ACTIVATE = "save_and_activate", "Save and activate"
        REMOVE = "remove", "Remove"

    class Status(models.TextChoices):
        WAITING = "waiting", "Waiting"
        APPROVED = "approved", "Approved"
        REJECTED = "rejected", "Rejected"

    provider_id = models.CharField("provider", max_length=64)
    action = models.CharField(max_length=20, choices=Action.choices)
    base_version = models.PositiveIntegerField()
    config = EncryptedJSONField(null=True, editable=False)
    diff = models.JSONField(default=list)
    author = models.CharField(max_length=200)
    reason = models.CharField(max_length=500, blank=True)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.WAITING)
    created_at = models.DateTimeField(default=timezone.now)
    decided_by = models.CharField(max_length=200, blank=True)
    decided_at = models.DateTimeField(null=True)

    objects = AnnouncedQuerySet.as_manager()

    class Meta:
        verbose_name = "pending change"
        ordering = ("-id",)
        constraints = (
            models.CheckConstraint(
                condition=~Q(status="approved") | (~Q(decided_by=F("author")) & ~Q(decided_by="")),
                name="providers_approved_by_a_second_person",
            ),
            models.CheckConstraint(
                condition=Q(status__in=("waiting", "approved", "rejected")),
                name="providers_pending_status_is_known",
            ),
            models.CheckConstraint(
                condition=Q(status="waiting") | Q(config__isnull=True),
                name="providers_decided_change_keeps_no_config",
            ),
        )

    def __str__(self) -> str:
        return f"{self.get_action_display()} {self.provider_id}"

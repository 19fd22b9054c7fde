"""What a provider's configuration was, is, and is asked to become."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from providers.fields import EncryptedJSONField
from providers.hidden_characters import visible
from providers.models.announced import AnnouncedQuerySet


class ConfigVersion(models.Model):
    """One version of what is configured: never changed, and kept when its subject goes.

    `subject` is a provider's id, or `app.model:key` for a row that `providers.guarded` knows.
    `content` holds `config` and a random `salt`; `content_hash` is the SHA-256 of both and of the
    version's name, so that it proves the content and lets nobody guess a short secret from it.
    `diff` is against the version before, with secrets masked. Removing a provider is a version
    too, with an empty configuration.
    """

    subject = models.CharField("subject", max_length=64)
    shown_as = models.CharField(max_length=200, blank=True)
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
                fields=("subject", "version"), name="providers_version_is_unique"
            ),
        )

    def __str__(self) -> str:
        return f"{visible(self.shown_as or self.subject)} version {self.version}"


class PendingChange(models.Model):
    """A change that waits for a second administrator, under the two-person rule.

    `subject` is named as in a version, without a key for a row that is to be made. Of a provider
    `config` is complete and validated, of a row it holds what differs; it is null where only
    `action` matters. Who asked for it can never decide in its favour, which the database enforces
    by the accounts' ids: names can be changed.
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

    subject = models.CharField("subject", max_length=64)
    shown_as = models.CharField(max_length=200, blank=True)
    action = models.CharField(max_length=20, choices=Action.choices)
    base_version = models.PositiveIntegerField()
    config = EncryptedJSONField(null=True, editable=False)
    diff = models.JSONField(default=list)
    author = models.CharField(max_length=200)
    author_id = models.BigIntegerField(null=True)
    reason = models.CharField(max_length=500, blank=True)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.WAITING)
    created_at = models.DateTimeField(default=timezone.now)
    decided_by = models.CharField(max_length=200, blank=True)
    decided_by_id = models.BigIntegerField(null=True)
    decided_at = models.DateTimeField(null=True)

    objects = AnnouncedQuerySet.as_manager()

    class Meta:
        verbose_name = "pending change"
        ordering = ("-id",)
        constraints = (
            models.CheckConstraint(
                condition=~Q(status="approved")
                | (~Q(decided_by_id=F("author_id")) & ~Q(decided_by="")),
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
        return f"{self.get_action_display()} {visible(self.shown_as or self.subject)}"

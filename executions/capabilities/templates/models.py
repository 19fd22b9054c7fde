"""Templates and their versions."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from executions.kernel.claims import Claimable
from executions.kernel.text import uuid7
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration
from providers.templates.advisories import MOST_NAME
from providers.templates.base import OWN, Base
from providers.templates.declaration import Declaration, check_name
from providers.templates.lock import Lock

MOST_LOG_CHARACTERS = 64 * 1024


class Template(models.Model):
    """A name, and whose it is: a tenant's, or the installation's without a tenant.

    One that is removed keeps its row while a version of it is in use.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    tenant = models.ForeignKey(
        Tenant,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="templates",
        help_text="Empty: of the installation, for all tenants.",
    )
    name = models.CharField(max_length=63)
    description = models.CharField(max_length=300, blank=True, default="")
    created_by = models.CharField(max_length=200, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    removed_at = models.DateTimeField(null=True, editable=False)
    tags = models.JSONField(
        default=dict, editable=False, help_text="The number of a version by each tag."
    )

    class Meta:
        ordering = ("tenant", "name", "-id")
        permissions = (("build_template", "Can build, cancel and remove templates"),)
        constraints = (
            models.UniqueConstraint(
                fields=("tenant", "name"),
                condition=Q(removed_at=None, tenant__isnull=False),
                name="template_name_once_per_tenant",
            ),
            models.UniqueConstraint(
                fields=("name",),
                condition=Q(removed_at=None, tenant__isnull=True),
                name="template_name_once_for_installation",
            ),
        )

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)

    def clean(self) -> None:
        """Raises ValidationError for what cannot be a name."""
        try:
            check_name(self.name)
        except InvalidConfiguration as error:
            raise ValidationError({"name": error.message}) from None


class TemplateVersion(Claimable):
    """One build of a template. What it was built of, and what came of it, is bound by the ledger.

    A process that builds it has claimed it, and says so again. One that is ready never changes.
    """

    class State(models.TextChoices):
        PENDING = "pending", "Waits for approval"
        QUEUED = "queued", "Queued"
        RESOLVING = "resolving", "Resolving packages"
        BUILDING = "building", "Building"
        READY = "ready", "Ready"
        FAILED = "failed", "Failed"
        CANCELLED = "cancelled", "Cancelled"

    UNDER_WAY = (State.RESOLVING, State.BUILDING)
    ACTIVE = (State.PENDING, State.QUEUED, *UNDER_WAY)

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    template = models.ForeignKey(Template, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    declaration = models.JSONField(help_text="What was asked for.")
    lock = models.JSONField(
        null=True, help_text="The files that it came to, each with its hash. Null: not resolved."
    )
    base = models.JSONField(
        default=dict,
        blank=True,
        help_text="What the base was when it was built. Empty: this machine.",
    )
    state = models.CharField(max_length=9, choices=State.choices, default=State.QUEUED)
    log = models.TextField(blank=True, default="")
    digest = models.CharField(max_length=64, blank=True, default="", help_text="Of all its files.")
    size_bytes = models.PositiveBigIntegerField("size (bytes)", default=0)
    python = models.CharField(max_length=16, blank=True, default="")
    licences = models.JSONField(default=dict, help_text="The licence of each package.")
    execution_id = models.UUIDField(
        "execution", null=True, help_text="The execution that resolved the packages."
    )
    requested_by = models.CharField(max_length=200)
    approved_by = models.CharField(max_length=200, blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-id",)
        default_permissions = ("view",)
        indexes = (
            models.Index(
                fields=("id",),
                name="template_version_to_build",
                condition=Q(state__in=("queued", "resolving", "building")),
            ),
            models.Index(
                fields=("digest",), name="template_version_digest", condition=~Q(digest="")
            ),
        )
        constraints = (
            models.UniqueConstraint(
                fields=("template", "number"), name="template_version_number_once"
            ),
            models.UniqueConstraint(
                fields=("template",),
                condition=Q(state__in=("pending", "queued", "resolving", "building")),
                name="template_version_one_active",
            ),
            models.CheckConstraint(
                condition=Q(
                    state__in=(
                        *("pending", "queued", "resolving", "building"),
                        *("ready", "failed", "cancelled"),
                    )
                ),
                name="template_version_state_is_known",
            ),
            models.CheckConstraint(
                condition=Q(state="ready", lock__isnull=False) & ~Q(digest="")
                | ~Q(state="ready") & Q(digest=""),
                name="template_version_ready_has_a_digest",
            ),
            models.CheckConstraint(
                condition=Q(state__in=("ready", "failed", "cancelled"), ended_at__isnull=False)
                | Q(~Q(state__in=("ready", "failed", "cancelled")), ended_at=None),
                name="template_version_ended_has_a_time",
            ),
        )

    def __str__(self) -> str:
        return f"{self.template.name}@{self.number}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)

    @property
    def is_active(self) -> bool:
        return self.state in self.ACTIVE

    @property
    def declared(self) -> Declaration:
        """Raises InvalidConfiguration for what is none."""
        return Declaration.parse(self.declaration)

    @property
    def based(self) -> Base:
        """Return what it was built on. Raises InvalidConfiguration for what is none."""
        return Base.from_json(self.base) if self.base else OWN

    @property
    def locked(self) -> Lock:
        """Return its files; without a lock there are none."""
        return Lock.from_json(self.lock or ())


class TemplateDraft(models.Model):
    """A build that a client has announced and whose declaration is still to come.

    Its id is that of the version that comes of it, which is given these tags once it is ready.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    template = models.ForeignKey(Template, on_delete=models.CASCADE, related_name="drafts")
    tags = models.JSONField(default=list)
    created_at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.template.name} {self.id}"


class PackageAdvisory(models.Model):
    """What an advisory says of one package. A load of another file replaces those of its kinds."""

    advisory_id = models.CharField(max_length=64)
    kind = models.CharField(max_length=6, choices=(("python", "Python"), ("npm", "npm")))
    name = models.CharField(max_length=MOST_NAME)
    data = models.JSONField(help_text="Its summary, and the versions that are affected.")
    load = models.UUIDField(db_index=True, help_text="The load that it came with.")

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(
                fields=("kind", "name", "advisory_id"), name="package_advisory_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.advisory_id} {self.name}"


class TemplateUpload(models.Model):
    """An archive of files for builds of a template, by the hash that its client has given it."""

    template = models.ForeignKey(Template, on_delete=models.CASCADE, related_name="uploads")
    hash = models.CharField(max_length=64)
    content = models.BinaryField()
    created_at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("template", "hash"), name="template_upload_once"),
        )

    def __str__(self) -> str:
        return f"{self.template.name} {self.hash}"

"""Network lists, and the attempts to reach hosts that were held against them."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from executions.kernel.public_suffixes import check_rules
from executions.kernel.text import uuid7
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from providers.network import Budget, NetworkPolicy

_USUAL = Budget()
MIB = 1024 * 1024


class NetworkList(models.Model):
    """What the sandboxes of all tenants may reach, or those of one tenant; or the draft of that.

    A tenant's list narrows the installation's, whose `tenant_slug` is empty. Without that one
    nothing can be reached. A draft is not in force.
    """

    class Mode(models.TextChoices):
        NONE = "none", "none: no host"
        ALLOWLIST = "allowlist", "allowlist: the hosts of the rules"
        OPEN = "open", "open: all public hosts"

    tenant_slug = models.CharField("tenant", max_length=64, blank=True)
    draft = models.BooleanField(default=False, editable=False, help_text="A draft is not active.")
    name = models.CharField(max_length=100, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    mode = models.CharField(max_length=9, choices=Mode.choices, default=Mode.ALLOWLIST)
    rules = models.TextField(
        blank=True,
        default="",
        help_text="One rule per line: [METHODS ][scheme://]host[:ports][/path][ # reason], such as "
        "pypi.org, *.example.com:443 or GET,HEAD http://api.example.com/v1 # prices.",
    )
    log_only = models.BooleanField(
        "log only",
        default=False,
        db_default=False,
        help_text="Refuses nothing and records what it would have refused.",
    )
    by_default = models.BooleanField(
        "default network",
        default=False,
        db_default=False,
        help_text="Runs and sessions that name no network get this one. Otherwise they get none.",
    )
    connections = models.PositiveIntegerField(
        "connections at once",
        default=_USUAL.connections,
        validators=[MinValueValidator(1), MaxValueValidator(10_000)],
        help_text="Of one sandbox.",
    )
    connections_per_minute = models.PositiveIntegerField(
        default=_USUAL.connections_per_minute,
        validators=[MinValueValidator(1), MaxValueValidator(1_000_000)],
        help_text="Of one sandbox.",
    )
    mib = models.PositiveIntegerField(
        "traffic (MiB)",
        default=_USUAL.bytes // MIB,
        validators=[MinValueValidator(1), MaxValueValidator(1024 * 1024)],
        help_text="Of one sandbox, both ways together.",
    )

    class Meta:
        ordering = ("draft", "tenant_slug", "pk")
        constraints = (
            models.UniqueConstraint(
                fields=("tenant_slug",),
                condition=Q(draft=False),
                name="network_list_once_per_tenant",
            ),
            models.CheckConstraint(
                condition=Q(mode__in=("none", "allowlist", "open")),
                name="network_list_mode_is_known",
            ),
        )

    def __str__(self) -> str:
        state = ("draft" if self.draft else "", "" if self.tenant_slug else "installation")
        notes = ", ".join(filter(None, state))
        name = " ".join(filter(None, (self.tenant_slug, self.name)))
        if not name:
            return notes
        return f"{name} ({notes})" if notes else name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        self.clean()
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)

    def clean(self) -> None:
        """Give the rules their one form. Raises ValidationError for what is no list, and for an
        unknown tenant."""
        try:
            policy = self.policy
            check_rules(policy.rules)
        except ValueError as error:
            raise ValidationError({"rules": str(error)}) from None
        self.rules = "\n".join(map(str, policy.rules))
        if self.tenant_slug and not Tenant.objects.filter(slug=self.tenant_slug).exists():
            raise ValidationError({"tenant_slug": "Must be the slug of a tenant, or empty."})

    @property
    def policy(self) -> NetworkPolicy:
        """Raises ValueError for rules that are none."""
        return NetworkPolicy.parse(self.mode, self.rules.splitlines(), log_only=self.log_only)

    @property
    def budget(self) -> Budget:
        return Budget(self.connections, self.connections_per_minute, self.mib * MIB)


class NetworkAttempt(models.Model):
    """An attempt of a sandbox to reach a host. Between runs of a session it has no execution."""

    class Outcome(models.TextChoices):
        ALLOWED = "allowed", "Allowed"
        REFUSED = "refused", "Refused"
        FAILED = "failed", "Failed"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    execution = models.ForeignKey(
        Execution, on_delete=models.CASCADE, null=True, related_name="network_attempts"
    )
    session_id = models.UUIDField(null=True)
    tenant = models.ForeignKey(
        Tenant,
        on_delete=models.SET_NULL,
        null=True,
        related_name="network_attempts",
        db_index=False,
    )
    tenant_slug = models.CharField("tenant", max_length=64)
    at = models.DateTimeField("time")
    host = models.CharField(max_length=255)
    port = models.PositiveIntegerField()
    method = models.CharField(max_length=16, blank=True)
    path = models.CharField(max_length=256, blank=True)
    outcome = models.CharField(max_length=8, choices=Outcome.choices)
    why = models.CharField("reason", max_length=100, blank=True)
    layer = models.CharField(
        "list", max_length=16, blank=True, help_text="Whose list refused it, or would have."
    )
    rule = models.CharField(max_length=300, blank=True, help_text="The rule that allowed it.")
    noted = models.BooleanField(
        "log only", default=False, help_text="A list that only logs would have refused it."
    )
    sent = models.BigIntegerField("bytes sent", default=0)
    received = models.BigIntegerField("bytes received", default=0)
    seconds = models.FloatField(default=0.0)

    class Meta:
        ordering = ("-id",)
        default_permissions = ("view",)
        indexes = (
            models.Index(fields=("tenant", "-id"), name="network_attempt_tenant"),
            models.Index(fields=("host", "-id"), name="network_attempt_host"),
            models.Index(
                fields=("tenant_slug", "id"),
                name="network_attempt_of_no_run",
                condition=Q(execution__isnull=True),
            ),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(outcome__in=("allowed", "refused", "failed")),
                name="network_attempt_outcome_is_known",
            ),
        )

    def __str__(self) -> str:
        # Not the host, which a program chose: pages show this as it is.
        return str(self.pk)

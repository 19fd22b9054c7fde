"""Tenants, their API keys, refusals of keys, and the windows of the rate limit."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from datetime import datetime
from itertools import combinations
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from providers import isolation
from providers.languages import normalize_language


def _bound(label: str, help_text: str, most: int) -> models.PositiveIntegerField[Any, Any]:
    return models.PositiveIntegerField(
        label,
        null=True,
        blank=True,
        validators=[MaxValueValidator(most)],
        help_text=help_text,
    )


def _limit(label: str, help_text: str, most: int) -> models.PositiveIntegerField[Any, Any]:
    """How much of what a run leaves or says is kept."""
    return models.PositiveIntegerField(
        label,
        null=True,
        blank=True,
        validators=[MaxValueValidator(most)],
        help_text=help_text,
    )


class Tenant(models.Model):
    """The owner of API keys and executions. Records and commands name it by its slug."""

    slug = models.SlugField(max_length=64, unique=True)
    name = models.CharField(max_length=200)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    is_active = models.BooleanField(
        "active", default=True, help_text="API keys of an inactive tenant are rejected."
    )
    removal_began_at = models.DateTimeField(
        "removal started",
        null=True,
        blank=True,
        editable=False,
        help_text="Rows are deleted in batches; the tenant row is deleted last.",
    )

    max_running = _bound("max concurrent executions", "0 blocks all executions.", 10_000)
    max_queued = _bound("max queued executions", "Executions that wait for a worker.", 100_000)
    max_stored_mib = _bound(
        "max stored per day (MiB)",
        "Queued requests, output, results and artifacts. The day is UTC.",
        100 * 1024 * 1024,
    )
    max_requests_per_minute = _bound(
        "max requests per minute", "All API requests with the tenant's keys.", 10_000_000
    )
    max_executions_per_day = _bound("max executions per day", "The day is UTC.", 1_000_000_000)
    max_seconds_per_day = _bound(
        "max execution time per day (seconds)",
        "A running execution counts with its full timeout. The day is UTC.",
        1_000_000_000,
    )
    max_sessions = _bound(
        "max open sessions",
        "A new session beyond this closes the one that was idle longest.",
        10_000,
    )
    max_schedules = _bound("max schedules", "Paused schedules count too.", 10_000)
    max_storage_mib = _bound("storage limit (MiB)", "Saved files of sessions and snapshots.", 2**30)

    # Together they stay below what an answer of the pool service may have (`wire.REQUEST_LIMIT`).
    max_output_kb = _limit("max output (kB)", "Each for stdout and stderr.", 10_000)
    max_outputs = _limit("max rich outputs", "Number per run.", 200)
    max_outputs_mib = _limit("max rich output size (MiB)", "Total per run.", 32)
    max_artifacts = _limit("max artifacts", "Files in artifacts/, per run.", 200)
    max_artifact_mib = _limit("max artifact size (MiB)", "Per file.", 64)
    max_artifacts_mib = _limit("max total artifact size (MiB)", "Total per run.", 64)

    keep_code_days = models.PositiveSmallIntegerField(
        "code retention (days)",
        null=True,
        blank=True,
        help_text="Code, arguments and the on-behalf-of subject.",
    )
    keep_output_days = models.PositiveSmallIntegerField(
        "output retention (days)", null=True, blank=True, help_text="Output and results."
    )
    keep_artifacts_days = models.PositiveSmallIntegerField(
        "artifact retention (days)", null=True, blank=True, help_text="Artifact files."
    )
    keep_records_days = models.PositiveSmallIntegerField(
        "record retention (days)",
        null=True,
        blank=True,
        help_text="The whole record; its ledger entry stays. "
        "At least SANDBOX_MIN_RECORD_RETENTION_DAYS.",
    )

    minimum_isolation = models.CharField(
        max_length=16,
        blank=True,
        choices=isolation.CHOICES,
        help_text="Weaker sandboxes are not used for this tenant. The strictest of tenant, route "
        "and MINIMUM_ISOLATION applies.",
    )

    class Meta:
        ordering = ("slug",)
        constraints = (
            models.CheckConstraint(
                condition=Q(minimum_isolation__in=("", *isolation.LEVELS)),
                name="tenant_minimum_isolation_is_known",
            ),
            models.CheckConstraint(
                condition=Q(removal_began_at=None) | Q(is_active=False),
                name="tenant_that_goes_is_inactive",
            ),
        )

    def __str__(self) -> str:
        return self.slug

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)


class Scope(models.TextChoices):
    """What a key is for. Which endpoint needs which is told by `doors.native.authentication`."""

    EXECUTE = "execute", "Run code"
    FILES = "files", "Read and write session files"
    SESSIONS = "sessions", "Open, change and close sessions"
    READ = "read", "Read records, results and artifacts"
    TEMPLATES = "templates", "Build and remove templates"
    ADMIN = "admin", "Configure providers"


def as_words(words: Collection[str]) -> str:
    """Several words as a column has them: each once, in order, with a space between."""
    return " ".join(sorted(set(words)))


# A template decides what the code of other keys is given: who builds them is chosen on purpose.
USUAL_SCOPES = as_words(set(Scope.values) - {Scope.ADMIN, Scope.TEMPLATES})
SCOPES = tuple(
    as_words(each) for n in range(len(Scope.values) + 1) for each in combinations(Scope.values, n)
)
# What a key may be held to, each a list of words; an empty one holds it to nothing.
WORD_BOUNDS = ("languages", "providers", "templates", "addresses")


def check_scopes(text: str) -> None:
    if unknown := set(text.split()) - set(Scope.values):
        known = ", ".join(Scope.values)
        raise ValidationError(f"{', '.join(sorted(unknown))}: Must be among {known}.")


def check_networks(text: str) -> None:
    for word in text.split():
        try:
            ipaddress.ip_network(word)
        except ValueError as error:
            raise ValidationError(f"{error}.") from None


def _bounds_field(label: str, help_text: str, *validators: Any) -> models.CharField[Any, Any]:
    return models.CharField(
        label,
        max_length=1000,
        blank=True,
        default="",
        db_default="",
        validators=validators,
        help_text=f"{help_text} Separate with spaces. Empty: no restriction.",
    )


class ApiKey(models.Model):
    """A tenant's key, of which only the hash is stored.

    The key holds 256 random bits, so a plain SHA-256 cannot be reversed by guessing and the
    lookup by hash takes the same time for every wrong key.
    """

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=100)
    prefix = models.CharField(
        max_length=16, editable=False, help_text="First characters of the key."
    )
    scopes = models.CharField(
        max_length=64,
        blank=True,
        default=USUAL_SCOPES,
        db_default=USUAL_SCOPES,
        validators=[check_scopes],
        help_text="What the key can do. A key without scopes can do nothing.",
    )
    languages = _bounds_field(
        "languages", "Allowed languages. Session commands count as bash and command."
    )
    providers = _bounds_field("providers", "Allowed providers.")
    templates = _bounds_field("templates", "Allowed templates of runs and sessions.")
    addresses = _bounds_field("addresses", "Allowed client addresses and networks.", check_networks)
    minimum_isolation = models.CharField(
        max_length=16,
        blank=True,
        default="",
        db_default="",
        choices=isolation.CHOICES,
        help_text="Weaker sandboxes are not used for requests with this key.",
    )
    key_hash = models.CharField(max_length=64, unique=True, editable=False)
    rotated_from = models.CharField(
        max_length=16,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="First characters of the replaced key.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        verbose_name = "API key"
        ordering = ("tenant", "name")
        constraints = (
            models.CheckConstraint(
                condition=models.Q(scopes__in=SCOPES), name="api_key_scopes_are_known"
            ),
            models.CheckConstraint(
                condition=models.Q(minimum_isolation__in=("", *isolation.LEVELS)),
                name="api_key_minimum_isolation_is_known",
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        self.clean()
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)

    def clean(self) -> None:
        """Give each list of words its one form."""
        for name in ("scopes", *WORD_BOUNDS):
            setattr(self, name, as_words(getattr(self, name).split()))
        self.languages = as_words([normalize_language(each) for each in self.languages.split()])

    def is_valid(self, now: datetime) -> bool:
        """Neither revoked nor expired at `now`. Says nothing about the tenant."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)

    def has_scope(self, scope: str) -> bool:
        return scope in self.scopes.split()

    def allows(self, bound: str, value: str) -> bool:
        """Whether one of its lists of words has this one, or is empty."""
        words = getattr(self, bound).split()
        return not words or value in words

    def allows_address(self, address: str) -> bool:
        """Whether it may be used from there. An address that is not known is in no network."""
        if not self.addresses:
            return True
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        found = getattr(found, "ipv4_mapped", None) or found
        return any(found in ipaddress.ip_network(word) for word in self.addresses.split())


class KeyRefusal(models.Model):
    """When a refusal of a key, for one reason, was entered in the ledger last.

    A row for each key and reason, so that however often a key is refused, and by however many
    processes, the ledger grows by a bounded number of entries.
    """

    subject = models.CharField(
        max_length=32, help_text="Number of the key; all unknown keys share one."
    )
    reason = models.CharField(max_length=32)
    entered_at = models.DateTimeField()

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("subject", "reason"), name="key_refusal_once"),
        )

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}"


class RequestWindow(models.Model):
    """The minute in which a tenant's API requests are counted, and how many it has had in it.

    A row for each tenant, changed by one statement: whoever finds less than the bound in it has
    taken a place, whichever process of whichever host it is.
    """

    tenant = models.OneToOneField(
        Tenant, on_delete=models.CASCADE, primary_key=True, related_name="request_window"
    )
    started = models.BigIntegerField(help_text="Unix time, from the database's clock.")
    taken = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.taken} since {self.started}"

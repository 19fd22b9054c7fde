from __future__ import annotations

import ipaddress
from collections.abc import Collection
from datetime import datetime
from itertools import combinations
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.utils import timezone

from executions.models.tenant import Tenant
from providers import isolation
from providers.languages import normalize_language


class Scope(models.TextChoices):
    """What a key is for. Which endpoint needs which is told by `executions.api.scopes`."""

    EXECUTE = "execute", "Run code"
    FILES = "files", "Read and write session files"
    SESSIONS = "sessions", "Open, change and close sessions"
    READ = "read", "Read records, results and artifacts"
    ADMIN = "admin", "Configure providers"


def as_words(words: Collection[str]) -> str:
    """Several words as a column has them: each once, in order, with a space between."""
    return " ".join(sorted(set(words)))


USUAL_SCOPES = as_words(set(Scope.values) - {Scope.ADMIN})
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


def _bound(label: str, help_text: str, *validators: Any) -> models.CharField[Any, Any]:
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
    languages = _bound(
        "languages", "Allowed languages. Session commands count as bash and command."
    )
    providers = _bound("providers", "Allowed providers.")
    templates = _bound("templates", "Allowed session templates.")
    addresses = _bound("addresses", "Allowed client addresses and networks.", check_networks)
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

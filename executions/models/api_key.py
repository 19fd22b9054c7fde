from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import models, transaction
from django.utils import timezone

from executions.models.tenant import Tenant


class ApiKey(models.Model):
    """A tenant's key, of which only the hash is stored.

    The key holds 256 random bits, so a plain SHA-256 cannot be reversed by guessing and the
    lookup by hash takes the same time for every wrong key.
    """

    class Scope(models.TextChoices):
        EXECUTE = "execute", "Run code"
        ADMIN = "admin", "Run code and configure providers"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=100)
    prefix = models.CharField(
        max_length=16, editable=False, help_text="The first characters, to tell keys apart."
    )
    scope = models.CharField(max_length=16, choices=Scope.choices, default=Scope.EXECUTE)
    key_hash = models.CharField(max_length=64, unique=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        verbose_name = "API key"
        ordering = ("tenant", "name")
        constraints = (
            models.CheckConstraint(
                condition=models.Q(scope__in=("execute", "admin")), name="api_key_scope_is_known"
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)

    def is_valid(self, now: datetime) -> bool:
        """Neither revoked nor expired at `now`. Says nothing about the tenant."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)

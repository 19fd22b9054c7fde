"""The stored configuration of a provider."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.db.models.base import ModelBase

from providers.fields import EncryptedJSONField
from providers.models.announced import AnnouncedQuerySet


class _WithNaturalKey(AnnouncedQuerySet["ProviderConfig"]):
    def get_by_natural_key(self, provider_id: str) -> ProviderConfig:
        # Naming a provider needs none of its secrets, nor the key that they were encrypted with.
        return self.defer("config").get(provider_id=provider_id)


class ProviderConfig(models.Model):
    """One provider's configuration. At most one row is active: that provider runs the code.

    Change it through `providers.services`, which validates and refuses to overwrite somebody
    else's change. `version` counts the changes of `config`; every process loads the provider
    again when the active row or its version is another.
    """

    provider_id = models.CharField("provider", max_length=64, unique=True, editable=False)
    config = EncryptedJSONField(default=dict, editable=False)
    is_active = models.BooleanField("active", default=False, editable=False)
    version = models.PositiveIntegerField(default=1, editable=False)
    created_at = models.DateTimeField("created", auto_now_add=True)
    updated_at = models.DateTimeField("updated", auto_now=True)

    objects = _WithNaturalKey.as_manager()

    class Meta:
        verbose_name = "provider"
        ordering = ("provider_id",)
        permissions = (
            ("activate_providerconfig", "Can choose the active provider"),
            ("test_providerconfig", "Can test the connection of a provider"),
        )
        constraints = (
            models.UniqueConstraint(
                fields=["is_active"],
                condition=Q(is_active=True),
                name="providers_one_active",
                violation_error_message="Another provider is active.",
            ),
        )

    def __str__(self) -> str:
        return self.provider_id

    def save(
        self,
        *,
        force_insert: bool | tuple[ModelBase, ...] = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
    ) -> None:
        """Write the row. Writing `config` of an existing row takes a new version with it."""
        deferred = "config" in self.get_deferred_fields()
        writes_config = "config" in update_fields if update_fields is not None else not deferred
        bump = writes_config and not self._state.adding
        fields: Any = update_fields
        if bump:
            self.version = F("version") + 1
            fields = None if update_fields is None else {*update_fields, "version"}
        super().save(
            force_insert=force_insert,
            force_update=force_update,
            using=using,
            update_fields=fields,
        )
        if bump:
            self.refresh_from_db(fields=["version"])

    def natural_key(self) -> tuple[str]:
        return (self.provider_id,)

from __future__ import annotations

from django.db import models
from django.utils import timezone


class LegalHold(models.Model):
    """What must not be erased while this stands: all of a tenant's executions, or one of them.

    To change or to lift one always takes two administrators. `holds` has the rules.
    """

    tenant_slug = models.SlugField("tenant", max_length=64, help_text="Slug of the tenant.")
    execution_id = models.UUIDField(
        "execution", null=True, blank=True, help_text="Empty: all executions of the tenant."
    )
    reason = models.CharField(max_length=500, help_text="The case, and who requested the hold.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ("tenant_slug", "-created_at")
        constraints = (
            models.CheckConstraint(
                condition=~models.Q(tenant_slug="") & ~models.Q(reason=""),
                name="legal_hold_names_its_tenant_and_reason",
            ),
        )

    def __str__(self) -> str:
        return f"{self.tenant_slug}: {self.execution_id or 'everything'}"

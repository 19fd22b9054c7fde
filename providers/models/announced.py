from __future__ import annotations

from typing import Any, TypeVar

from django.db import models, transaction

from providers.signals import rows_updated

Row = TypeVar("Row", bound=models.Model)


class AnnouncedQuerySet(models.QuerySet[Row]):
    """Rows whose conditional UPDATEs are told of, as their saving and deleting are by Django."""

    def update(self, **values: Any) -> int:
        with transaction.atomic(using=self.db, savepoint=False):
            pks = list(self.order_by().select_for_update().values_list("pk", flat=True))
            changed = super().update(**values) if pks else 0
            if changed:
                rows_updated.send(sender=self.model, pks=pks)
        return changed

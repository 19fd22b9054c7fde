from __future__ import annotations

from django.core.files.storage import Storage, storages
from django.db import models
from django.utils import timezone

from executions.kernel.storage import ARTIFACTS
from executions.models.execution import Execution


def artifact_storage() -> Storage:
    """Where artifacts are kept. A callable, so that migrations do not fix the place."""
    return storages[ARTIFACTS]


class Artifact(models.Model):
    """A file an execution left behind. Its name never decides where it is stored."""

    execution = models.ForeignKey(Execution, on_delete=models.CASCADE, related_name="artifacts")
    name = models.CharField(max_length=512)
    mime_type = models.CharField(max_length=127)
    size_bytes = models.PositiveBigIntegerField()
    sha256 = models.CharField(max_length=64)
    file = models.FileField(storage=artifact_storage, max_length=255)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ("pk",)
        constraints = [
            models.UniqueConstraint(fields=("execution", "name"), name="artifact_name_is_unique")
        ]

    def __str__(self) -> str:
        return self.name

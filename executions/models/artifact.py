from __future__ import annotations

import os

from django.conf import settings
from django.core.files.storage import FileSystemStorage, Storage
from django.db import models
from django.utils import timezone

from executions.models.execution import Execution


class ArtifactStorage(FileSystemStorage):
    """The data directory's artifacts folder, readable by the service's own user alone."""

    def __init__(self) -> None:
        super().__init__(file_permissions_mode=0o600, directory_permissions_mode=0o700)

    @property
    def base_location(self) -> str:
        return str(settings.DATA_DIR / "artifacts")

    @property
    def location(self) -> str:
        return os.path.abspath(self.base_location)


def artifact_storage() -> Storage:
    """Where artifacts are kept. A callable, so that migrations do not fix the place."""
    return ArtifactStorage()


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

from __future__ import annotations

from django.conf import settings
from django.db import models


class SavedFilter(models.Model):
    """A filtered list of executions under a name, for its owner or for everybody."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="saved_filters"
    )
    name = models.CharField(max_length=100)
    query = models.CharField(max_length=1000, help_text="Query string of the list.")
    is_shared = models.BooleanField("shared", default=False)

    class Meta:
        ordering = ("name",)
        permissions = (("share_savedfilter", "Can share saved filters"),)
        constraints = [
            models.UniqueConstraint(fields=("owner", "name"), name="saved_filter_name_is_unique")
        ]

    def __str__(self) -> str:
        return self.name

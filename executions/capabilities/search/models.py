"""The searchable text of code, and saved filters."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class CodeText(models.Model):
    """The text of a program that was run, once for all executions of it, to be searched.

    A copy, made and removed by `executions.capabilities.search.service`. The database keeps an
    index of every three characters over it: SQLite's FTS5, PostgreSQL's pg_trgm.
    """

    code_hash = models.CharField(max_length=71, unique=True)
    code = models.TextField()

    def __str__(self) -> str:
        return self.code_hash


class CodeSearchProgress(models.Model):
    """One row: every execution before `before` has been looked at."""

    before = models.UUIDField()

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(pk=1), name="code_search_progress_is_one_row")
        ]

    def __str__(self) -> str:
        return str(self.before)


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

from __future__ import annotations

from django.db import models


class CodeText(models.Model):
    """The text of a program that was run, once for all executions of it, to be searched.

    A copy, made and removed by `executions.services.code_search`. The database keeps an index of
    every three characters over it: SQLite's FTS5, PostgreSQL's pg_trgm.
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

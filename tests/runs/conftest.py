"""What this folder's tests share: an auditor, and many rows of everything."""

from __future__ import annotations

from tests.support.execution_rows import auditor
from tests.support.query_budgets import names

__all__ = ("auditor", "names")

"""Who looks at the pages in this folder's tests."""

from __future__ import annotations

from tests.support.browser import caller
from tests.support.execution_rows import auditor
from tests.support.report_pages import login

__all__ = ("auditor", "caller", "login")

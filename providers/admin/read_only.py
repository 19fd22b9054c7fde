"""What the admin shows and never changes."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest


class ReadOnly:
    """Rows that nobody adds, changes or removes in the admin, whatever their permissions."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

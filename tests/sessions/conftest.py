"""What this folder's tests share: a service of sandboxes that stay."""

from __future__ import annotations

from tests.support.kept_service import shared_service

__all__ = ("shared_service",)

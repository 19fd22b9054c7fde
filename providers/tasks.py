"""What the workers are asked to do, by dotted name. Rules live in the services."""

from __future__ import annotations

from providers.services import health


def check_health() -> int:
    return health.check_all()


def sweep_leftovers() -> int:
    return health.sweep_leftovers()

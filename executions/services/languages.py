"""Which languages can be served, as far as it is known without waiting for anybody."""

from __future__ import annotations

from collections.abc import Iterable

from executions.services.asking import guarded
from executions.services.routes import Step
from providers.errors import InvalidConfiguration, SandboxError
from providers.looks import languages_of
from providers.manager import Lease


def supported_languages(lease: Lease) -> list[str]:
    """What the leased provider runs, a few seconds old. Raises SandboxError."""
    told = guarded(lease.provider_id, lambda: languages_of(lease.provider))
    return sorted(name for name in told if isinstance(name, str))


def refuse_unsupported(language: str, steps: Iterable[Step]) -> None:
    """Raise InvalidConfiguration for a language that none of the providers runs.

    A provider that cannot be asked, or is still starting, is no reason to refuse: the attempt is
    then made, and recorded with what became of it.
    """
    known: set[str] = set()
    for step in steps:
        try:
            with step.route(wait=False) as lease:
                known.update(supported_languages(lease))
        except SandboxError:
            return
        if language in known:
            return
    raise InvalidConfiguration(
        f"language: Must be one of: {', '.join(sorted(known))}.", field="language"
    )

"""The template `data`: the default packages of a provider, as `manage.py packages` installs them.

It is no row, and is built by no one here. Every installation has the name.
"""

from __future__ import annotations

from uuid import UUID

from executions.runs.routing import ProviderIncompatible
from providers.manager import loaded
from providers.templates.declaration import DEFAULT, Declaration
from providers.values import Packages

# What sessions have in the place of a version.
ID = UUID("0b6b2f5e-0d5c-4d0e-9a7e-6f1c5b0a4d01")
DESCRIPTION = "The default packages of this installation."


def default_packages() -> Packages | None:
    """Return the default packages, as a provider that this process has loaded knows them; None
    where none does."""
    known = [lease.provider.get_packages() for lease in loaded()]
    found = [each for each in known if each is not None]
    return next((each for each in found if each.digest), next(iter(found), None))


def installed_packages() -> Packages | None:
    """Return the default packages, None where they are not installed."""
    known = default_packages()
    return known if known is not None and known.digest else None


def default_declaration() -> Declaration:
    """Return what a template asks for that begins with the default packages: their versions."""
    known = default_packages()
    versions = known.versions if known is not None else {}
    return Declaration(python=tuple(f"{name}=={version}" for name, version in versions.items()))


def ensure_default(provider_id: str, known: Packages | None) -> str:
    """Return the digest of a provider's default packages. Raises ProviderIncompatible where it has
    none by now."""
    if known is not None and known.digest:
        return known.digest
    if known is None:
        problem = f"{provider_id} has no default packages, which the template {DEFAULT} is."
    elif known.state == "preparing":
        problem = f"The packages of {DEFAULT} are being installed now. Try again in a minute."
    else:
        why = f" ({known.reason})" if known.reason else ""
        problem = (
            f"{provider_id} does not have the packages of {DEFAULT} yet{why}. An administrator can "
            "run manage.py packages."
        )
    raise ProviderIncompatible(problem, field="template")

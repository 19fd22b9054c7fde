"""What programs of a session have installed with pip, as a declaration of a template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from executions.capabilities.templates import defaults, names
from executions.runs.requests import Conflict
from executions.sessions.files import LOOK_SECONDS, list_files
from executions.sessions.models import Session
from executions.sessions.requests import FileListing
from providers.errors import InvalidConfiguration
from providers.templates.declaration import Declaration

_PLACE = ".local/lib"
_MOST_FOLDERS = 4000
_RELEASE = re.compile(r"python3\.[0-9]{1,3}")
_INSTALLED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._]{0,199})-([^-/]{1,100})\.dist-info")


async def added_packages(session: Session) -> list[str]:
    """Return what pip has installed in a session, such as `six==1.17.0`, by name.

    The names are the sandbox's own word. Raises SandboxError.
    """
    found = {}
    for release in await _names_in(session, _PLACE):
        if not _RELEASE.fullmatch(release):
            continue
        for folder in await _names_in(session, f"{_PLACE}/{release}/site-packages"):
            installed = _INSTALLED.fullmatch(folder)
            if installed is None:
                continue
            try:
                version = Version(installed[2])
            except InvalidVersion:
                continue
            name = canonicalize_name(installed[1])
            found[name] = f"{name}=={version}"
    return [found[name] for name in sorted(found)]


async def declaration_of(session: Session) -> Declaration:
    """Return the declaration of the session's own template, with what was installed in it.

    Raises Conflict where nothing was, and what `Declaration.parse` raises.
    """
    if session.tenant_id is None:
        # What has no tenant would be the installation's.
        raise Conflict("The tenant of the session was removed.")
    added = await added_packages(session)
    if not added:
        raise Conflict("pip has installed nothing in the session that would make a template.")
    base = Declaration()
    if session.template_version is not None:
        chosen = names.chosen_by_id(session.template_version)
        is_default = chosen.id == defaults.ID
        base = defaults.default_declaration() if is_default else chosen.declaration
    return Declaration.parse(replace(base, python=(*_others(base, added), *added)).to_json())


def _others(base: Declaration, added: Sequence[str]) -> list[str]:
    """What the template asks for, without what the session has another version of."""
    replaced = {each.partition("==")[0] for each in added}
    return [each for each in base.python if _name(each) not in replaced]


def _name(requirement: str) -> str:
    try:
        return canonicalize_name(Requirement(requirement).name)
    except InvalidRequirement:
        return ""


async def _names_in(session: Session, folder: str) -> list[str]:
    """The folders in a folder. None where it is not there: then nothing was installed."""
    try:
        entries, _ = await list_files(
            session, FileListing(path=folder), LOOK_SECONDS, is_use=False, most=_MOST_FOLDERS
        )
    except InvalidConfiguration as error:
        if error.field != "path":
            raise
        return []
    return [each.path.rpartition("/")[2] for each in entries if each.type == "directory"]

"""What programs of a session have installed with pip and npm, as a declaration of a template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from executions.capabilities.templates import defaults, names
from executions.runs.requests import Conflict
from executions.sessions.files import LOOK_SECONDS, inspect_file, list_files
from executions.sessions.models import Session
from executions.sessions.requests import FileListing
from providers.errors import InvalidConfiguration
from providers.templates.declaration import Declaration, is_npm_package

_PLACE = ".local/lib"
_MOST_FOLDERS = 4000
_RELEASE = re.compile(r"python3\.[0-9]{1,3}")
_INSTALLED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._]{0,199})-([^-/]{1,100})\.dist-info")
# What npm writes beside what it installs, and what was asked of it.
_NPM_LOCK, _NPM_ASKED = "node_modules/.package-lock.json", "package.json"
_NPM_BYTES = 4 << 20
_NPM_PLACE = "node_modules/"
_NPM_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+([-+][0-9A-Za-z.+-]+)?")


class Added(NamedTuple):
    """Packages with their versions, such as `six==1.17.0` and `dayjs@1.11.0`, by name."""

    python: tuple[str, ...]
    npm: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.python, *self.npm)


async def added_packages(session: Session) -> Added:
    """Return what pip and npm have installed in a session.

    The names are the sandbox's own word. Raises SandboxError.
    """
    return Added(tuple(await _added_with_pip(session)), tuple(await _added_with_npm(session)))


async def declaration_of(session: Session) -> Declaration:
    """Return the declaration of the session's own template, with what was installed in it.

    Raises Conflict where nothing was, and what `Declaration.parse` raises.
    """
    if session.tenant_id is None:
        # What has no tenant would be the installation's.
        raise Conflict("The tenant of the session was removed.")
    added = await added_packages(session)
    if not added.all:
        raise Conflict("pip and npm have installed nothing in the session that makes a template.")
    base = Declaration()
    if session.template_version is not None:
        chosen = names.chosen_by_id(session.template_version)
        is_default = chosen.id == defaults.ID
        base = defaults.default_declaration() if is_default else chosen.declaration
    python = (*_others(base.python, added.python, _name), *added.python)
    npm = (*_others(base.npm, added.npm, _npm_name), *added.npm)
    return Declaration.parse(replace(base, python=python, npm=npm).to_json())


async def _added_with_pip(session: Session) -> list[str]:
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


async def _added_with_npm(session: Session) -> list[str]:
    """What was asked of npm. Where that is not known, all that is at the top."""
    installed = _objects(await _read_json(session, _NPM_LOCK), "packages")
    found = {}
    for place, described in installed.items():
        name, version = place.removeprefix(_NPM_PLACE), str(described.get("version"))
        # Under another name, or from elsewhere, it is none of the registry's of this name.
        is_known = described.get("name", name) == name and not described.get("link")
        is_known = is_known and str(described.get("resolved", "")).startswith("http")
        if not (place.startswith(_NPM_PLACE) and is_known and _NPM_VERSION.fullmatch(version)):
            continue
        if is_npm_package(f"{name}@{version}"):
            found[name] = f"{name}@{version}"
    if not found:
        return []
    asked = (await _read_json(session, _NPM_ASKED)).get("dependencies")
    wanted = set(asked) & set(found) if isinstance(asked, dict) else set()
    return [found[name] for name in sorted(wanted or found)]


async def _read_json(session: Session, path: str) -> Mapping[str, Any]:
    """An object of a file. Empty for what is none, or not there."""
    content = await inspect_file(session, path, _NPM_BYTES)
    try:
        document = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _objects(document: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    found = document.get(name)
    return {
        key: value
        for key, value in (found.items() if isinstance(found, dict) else ())
        if isinstance(value, dict)
    }


def _others(base: Sequence[str], added: Sequence[str], name_of: Callable[[str], str]) -> list[str]:
    """What the template asks for, without what the session has another version of."""
    replaced = {name_of(each) for each in added}
    return [each for each in base if name_of(each) not in replaced]


def _name(requirement: str) -> str:
    try:
        return canonicalize_name(Requirement(requirement).name)
    except InvalidRequirement:
        return ""


def _npm_name(package: str) -> str:
    # The first character may be the @ of a scope.
    return package[:1] + package[1:].partition("@")[0]


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

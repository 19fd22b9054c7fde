"""Advisories on packages, as the OSV schema has them (ossf.github.io/osv-schema): which versions of
a package are known to be vulnerable or hostile.

They come from a file that an administrator loads, such as the `all.zip` of an ecosystem. Nothing
here asks a network.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

Ecosystem = Literal["python", "npm"]
_ECOSYSTEMS: Mapping[str, Ecosystem] = {"PyPI": "python", "npm": "npm"}

# Of one entry of a file, which says what is affected and is read by people.
_MOST_BYTES = 4 << 20
_MOST_ENTRIES = 1_000_000
# No registry has a longer one.
MOST_NAME = 300
_SEMVER = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?")


@dataclass(frozen=True)
class Range:
    """Versions from `introduced` on, before `fixed` or up to `last`. "0" is the first of all."""

    introduced: str
    fixed: str = ""
    last: str = ""


@dataclass(frozen=True)
class Advisory:
    """What is known of one package. A version is affected that is listed or in a range."""

    id: str
    kind: Ecosystem
    name: str
    summary: str
    ranges: tuple[Range, ...] = ()
    versions: tuple[str, ...] = ()

    def affects(self, version: str) -> bool:
        """Tell whether a version is affected. One that cannot be read is, where any is."""
        if version in self.versions:
            return True
        key = _python_key if self.kind == "python" else _npm_key
        return any(_is_in(each, version, key) for each in self.ranges)

    def fixed_for(self, version: str) -> str:
        """Return the first version after this one that is not affected, "" where none is known."""
        key = _python_key if self.kind == "python" else _npm_key
        return next((each.fixed for each in self.ranges if _is_in(each, version, key)), "")

    def to_json(self) -> dict[str, Any]:
        """Return what `of_json` needs, but for the id, the kind and the name."""
        ranges = [[each.introduced, each.fixed, each.last] for each in self.ranges]
        return {"summary": self.summary, "ranges": ranges, "versions": list(self.versions)}

    @classmethod
    def of_json(
        cls, known_as: str, kind: Ecosystem, name: str, data: Mapping[str, Any]
    ) -> Advisory:
        """Return the advisory that `to_json` was called of."""
        ranges = tuple(Range(*each) for each in data["ranges"])
        return cls(known_as, kind, name, data["summary"], ranges, tuple(data["versions"]))


def read(file: IO[bytes]) -> Iterator[Advisory]:
    """Yield the advisories of a zip archive of OSV entries, of a JSON list of them, or of one.

    Raises ValueError for what is none of these.
    """
    start = file.read(4)
    file.seek(0)
    if start == b"PK\x03\x04":
        try:
            with zipfile.ZipFile(file) as archive:
                for entry in archive.infolist()[:_MOST_ENTRIES]:
                    if entry.filename.endswith(".json") and entry.file_size <= _MOST_BYTES:
                        yield from parse(json.loads(archive.read(entry)))
        except (zipfile.BadZipFile, RecursionError, EOFError, NotImplementedError) as error:
            raise ValueError(f"the archive cannot be read: {error}") from None
        return
    try:
        document = json.load(io.TextIOWrapper(file, "utf-8"))
    except RecursionError:
        raise ValueError("the file is nested too deep") from None
    for each in document if isinstance(document, list) else [document]:
        yield from parse(each)


def parse(document: object) -> list[Advisory]:
    """Return what an OSV entry says of packages of Python and npm, once for each. Raises
    ValueError."""
    if not isinstance(document, dict) or not isinstance(document.get("id"), str):
        raise ValueError("an entry has no id")
    if document.get("withdrawn"):
        return []
    summary = str(document.get("summary") or document.get("details") or "").strip()
    found: dict[tuple[str, str], Advisory] = {}
    for affected in _list(document.get("affected")):
        package = affected.get("package")
        if not isinstance(package, dict):
            continue
        kind, name = _ECOSYSTEMS.get(str(package.get("ecosystem"))), str(package.get("name"))
        if kind is None or len(name) > MOST_NAME:
            continue
        name = canonicalize_name(name) if kind == "python" else name
        before = found.get((kind, name))
        found[kind, name] = Advisory(
            document["id"][:64],
            kind,
            name,
            summary.splitlines()[0][:300] if summary else "",
            (*(before.ranges if before else ()), *_ranges(affected)),
            (*(before.versions if before else ()), *_versions(affected)),
        )
    return list(found.values())


def _list(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _versions(affected: Mapping[str, Any]) -> tuple[str, ...]:
    listed = affected.get("versions")
    return tuple(str(each) for each in listed[:10_000]) if isinstance(listed, list) else ()


def _ranges(affected: Mapping[str, Any]) -> Iterator[Range]:
    for described in _list(affected.get("ranges")):
        if described.get("type") not in ("ECOSYSTEM", "SEMVER"):
            continue
        introduced = ""
        for event in _list(described.get("events")):
            if "introduced" in event:
                introduced = str(event["introduced"])
            elif introduced and ("fixed" in event or "last_affected" in event):
                fixed, last = event.get("fixed", ""), event.get("last_affected", "")
                yield Range(introduced, str(fixed), str(last))
                introduced = ""
        if introduced:
            yield Range(introduced)


def _is_in(affected: Range, version: str, key: Callable[[str], Any]) -> bool:
    try:
        at = key(version)
        if affected.introduced != "0" and at < key(affected.introduced):
            return False
        if affected.fixed:
            return bool(at < key(affected.fixed))
        return not affected.last or bool(at <= key(affected.last))
    except ValueError:
        return True


def _python_key(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion as error:
        raise ValueError(str(error)) from None


def _npm_key(version: str) -> tuple[Any, ...]:
    """Order versions as semver.org says: a release is after what leads up to it."""
    found = _SEMVER.fullmatch(version)
    if found is None:
        raise ValueError(f"{version!r} is no version of npm")
    numbers = tuple(int(part) for part in found.groups()[:3])
    before = [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in (found[4] or "").split(".")
        if part
    ]
    return (*numbers, 1 if not before else 0, tuple(before))

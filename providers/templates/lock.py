"""Locks: the files that a declaration comes to, each with its address and its hash.

Resolvers write them in a sandbox: uv a `pylock.toml` (PEP 751), npm a `package-lock.json`, apt the
lines of `--print-uris`. Nothing in them is believed but by its hash, and a file without one is
refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from providers.errors import InvalidConfiguration

# Of all packages of a template.
MOST_PACKAGES = 2000
MOST_LOCK_BYTES = 4 << 20
# Before the name of a wheel that was built of its source, in the place of an address.
BUILT = "built:///"

_HASH_BYTES = {"sha256": 32, "sha384": 48, "sha512": 64}
_VERSION = re.compile(r"[0-9A-Za-z.+!_-]{1,100}")
# A line of apt: the address, the name of the file, its size, its hash.
_URI = re.compile(
    r"'(?P<url>[^'\s]{1,2000})' (?P<name>[a-z0-9][a-z0-9+.-]{1,100})_(?P<version>[^_\s]{1,120})_"
    r"[a-z0-9-]{1,30}\.deb (?P<size>[0-9]{1,12}) (?P<algorithm>SHA256|SHA512):(?P<hash>[0-9a-f]+)"
)
_APT_VERSION = re.compile(r"[0-9A-Za-z.+~:-]{1,100}")
# A folder of node_modules, and those of packages below it.
_PLACE = re.compile(r"node_modules/(@[a-z0-9][a-z0-9._~-]*/)?[A-Za-z0-9][A-Za-z0-9._~-]*")


@dataclass(frozen=True)
class LockedPackage:
    """One file of a package. `hash` is hexadecimal; `size` is bytes where the lock has it.

    `place` is the folder of an npm package, such as `node_modules/dayjs`. `yanked` is why the index
    has yanked the file, None where it had not. A wheel that was built here has an address behind
    BUILT, and the address and `algorithm:hash` of its source.
    """

    kind: Literal["python", "npm", "apt"]
    name: str
    version: str
    url: str
    algorithm: str
    hash: str
    size: int | None = None
    place: str = ""
    yanked: str | None = None
    source_url: str = ""
    source_hash: str = ""

    @property
    def file_name(self) -> str:
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @property
    def is_source(self) -> bool:
        """Whether it is code of a Python package that has to be built."""
        return self.kind == "python" and not self.file_name.endswith(".whl")


@dataclass(frozen=True)
class Lock:
    """All files of a template, in the order of kind, name and place."""

    packages: tuple[LockedPackage, ...] = ()

    @classmethod
    def parse(
        cls,
        python: str = "",
        npm: str = "",
        apt: str = "",
        *,
        libc: str = "glibc",
        yanked: Mapping[str, str] = {},
        build: Collection[str] = (),
    ) -> Lock:
        """Read what the resolvers have written, for a system with this libc. `yanked` are reasons
        by the names of files, `build` the names of packages that may be sources.

        Raises InvalidConfiguration with field python, npm or apt.
        """
        found = [
            replace(each, yanked=yanked.get(each.file_name))
            for each in _python_packages(python, build)
        ]
        return cls._of([*found, *_npm_packages(npm, libc), *_debs(apt)])

    @classmethod
    def from_json(cls, stored: Iterable[Mapping[str, Any]]) -> Lock:
        """Read what `to_json` has returned."""
        return cls._of([LockedPackage(**each) for each in stored])

    @classmethod
    def _of(cls, packages: list[LockedPackage]) -> Lock:
        if len(packages) > MOST_PACKAGES:
            raise InvalidConfiguration(
                f"python: The lock has more than {MOST_PACKAGES} packages.", field="python"
            )
        return cls(tuple(sorted(packages, key=lambda each: (each.kind, each.name, each.place))))

    def replacing(self, packages: Mapping[str, LockedPackage]) -> Lock:
        """Return the lock with other files of some Python packages, by name."""
        return self._of(
            [
                packages.get(each.name, each) if each.kind == "python" else each
                for each in self.packages
            ]
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return a document for a JSON column."""
        return [asdict(each) for each in self.packages]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the files and their hashes, in hexadecimal."""
        lines = [
            f"{each.kind} {each.name} {each.version} {each.algorithm}:{each.hash} {each.place}"
            f"{each.source_hash}"
            for each in self.packages
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _refused(field: str, message: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"{field}: {message}", field=field)


def _checked(package: LockedPackage) -> LockedPackage:
    """Refuse what is no file of a registry with a hash."""
    field, label = package.kind, f"{package.name[:80]!r}"
    bytes_of_hash = _HASH_BYTES.get(package.algorithm)
    if bytes_of_hash is None or not re.fullmatch(f"[0-9a-f]{{{2 * bytes_of_hash}}}", package.hash):
        raise _refused(field, f"The lock has no SHA-256, SHA-384 or SHA-512 of {label}.")
    pattern = _APT_VERSION if package.kind == "apt" else _VERSION
    if not isinstance(package.version, str) or not pattern.fullmatch(package.version):
        raise _refused(field, f"The lock has no version of {label}.")
    address = urlsplit(package.url)
    if address.scheme not in ("http", "https") or not address.hostname or address.username:
        raise _refused(field, f"The lock has no address with http or https of {label}.")
    if package.size is not None and (type(package.size) is not int or package.size < 0):
        raise _refused(field, f"The lock has a size of {label} that is no number.")
    return package


def _python_packages(text: str, build: Collection[str]) -> list[LockedPackage]:
    if not text:
        return []
    if len(text) > MOST_LOCK_BYTES:
        raise _refused("python", "The lock is too large.")
    try:
        document = tomllib.loads(text)
        return [_wheel(each, build) for each in document.get("packages", [])]
    except (tomllib.TOMLDecodeError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise _refused("python", f"The lock cannot be read: {type(error).__name__}.") from None


def _wheel(described: Mapping[str, Any], build: Collection[str]) -> LockedPackage:
    name = canonicalize_name(str(described["name"]), validate=True)
    wheels = described.get("wheels") or []
    if not wheels and name in build and described.get("sdist"):
        wheels = [described["sdist"]]
    if not wheels:
        raise _refused(
            "python",
            f"{name!r} has no wheel for this machine, and source distributions are not built: they "
            "run code of the package. Name a version that has a wheel, or the package in build.",
        )
    # uv puts the wheel that fits best first.
    wheel = wheels[0]
    algorithm, digest = next(
        ((each, str(wheel["hashes"][each])) for each in _HASH_BYTES if each in wheel["hashes"]),
        ("", ""),
    )
    return _checked(
        LockedPackage(
            "python", name, described["version"], str(wheel["url"]), algorithm, digest,
            wheel.get("size"),
        )
    )  # fmt: skip


def _npm_packages(text: str, libc: str) -> list[LockedPackage]:
    if not text:
        return []
    if len(text) > MOST_LOCK_BYTES:
        raise _refused("npm", "The lock is too large.")
    try:
        document = json.loads(text)
        return [
            _tarball(place, each)
            for place, each in document["packages"].items()
            # The first is the project itself. What is optional and for another system is not there.
            if place and not (each.get("optional") and not _fits(each, libc))
        ]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise _refused("npm", f"The lock cannot be read: {type(error).__name__}.") from None


def _debs(text: str) -> Iterator[LockedPackage]:
    if len(text) > MOST_LOCK_BYTES:
        raise _refused("apt", "The lock is too large.")
    for line in text.splitlines():
        found = _URI.fullmatch(line.strip())
        if found is None:
            raise _refused("apt", f"{line[:120]!r} is no file with a SHA-256 or SHA-512.")
        yield _checked(
            LockedPackage(
                "apt", found["name"], unquote(found["version"]), found["url"],
                found["algorithm"].lower(), found["hash"], int(found["size"]),
            )
        )  # fmt: skip


def _fits(described: Mapping[str, Any], libc: str) -> bool:
    """Whether a package is for Linux on this kind of processor, as far as it says."""
    import platform

    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    for field, here in (("os", "linux"), ("cpu", machine), ("libc", libc)):
        wanted = described.get(field)
        if wanted and (f"!{here}" in wanted or not (here in wanted or wanted[0].startswith("!"))):
            return False
    return True


def _tarball(place: str, described: Mapping[str, Any]) -> LockedPackage:
    if described.get("link") or not re.fullmatch(f"{_PLACE.pattern}(/{_PLACE.pattern})*", place):
        raise _refused("npm", f"{place[:80]!r} in the lock is no package of a registry.")
    name = described.get("name") or place.rpartition("node_modules/")[2]
    # Hashes of several kinds may be there, the strongest counts.
    found = dict(
        part.split("-", 1) for part in str(described.get("integrity", "")).split() if "-" in part
    )
    algorithm = next((each for each in ("sha512", "sha384", "sha256") if each in found), "")
    try:
        digest = base64.b64decode(found.get(algorithm, ""), validate=True).hex()
    except binascii.Error:
        digest = ""
    version, url = described.get("version", ""), str(described.get("resolved", ""))
    return _checked(LockedPackage("npm", name, version, url, algorithm, digest, None, place))

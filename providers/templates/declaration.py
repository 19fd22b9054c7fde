"""The declaration of a template: what its sandboxes have beyond the programs of the machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from providers.errors import InvalidConfiguration
from providers.network import NetworkPolicy
from providers.runtime.guest.names import problem
from providers.templates import base as bases

# Of a name, which callers write in requests: no other template of the installation or of the tenant
# has it.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

# Of a Python package.
PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,198}[A-Za-z0-9])?")
# The name of the default packages, which are there without a declaration.
DEFAULT = "data"

MOST_REQUIREMENTS = 200
MOST_VARIABLES = 100
MOST_FILES = 100
MOST_COMMANDS = 100
MOST_SECONDS = 366 * 86_400
FILES_BYTES = 4 << 20
_TEXT = 1000
# Of a command that a build runs.
_COMMAND = 8000

# A package of npm: its name, with its scope, and a range of versions.
_NPM = re.compile(
    r"(@[a-z0-9][a-z0-9._~-]*/)?[a-z0-9][a-z0-9._~-]*(@[ 0-9A-Za-z.^~<>=|*+-]{1,60})?"
)
_MOST_NPM = 280
# A package of Debian, and its version.
_APT = re.compile(r"[a-z0-9][a-z0-9+.-]{1,60}(=[0-9][0-9A-Za-z.+:~-]{0,99})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Variables that say what a sandbox is, or by which its programs are found.
_RESERVED = ("PATH", "HOME", "TMPDIR", "NODE_PATH", "PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")

_FIELDS = (
    *("base", "python", "npm", "apt", "build", "environment", "files", "run"),
    *("start", "ready", "network", "limits"),
)


@dataclass(frozen=True)
class Limits:
    """How long a run may take, in seconds: one that names no timeout, and any. None is no limit."""

    timeout: float | None = None
    max_timeout: float | None = None

    def to_json(self) -> dict[str, float]:
        """Return what is limited."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def apply(self, seconds: float, *, is_named: bool) -> float:
        """Return the timeout in force, at most `seconds`. `is_named` tells whether the caller has
        named them."""
        usual = None if is_named else self.timeout
        return min(each for each in (seconds, usual, self.max_timeout) if each is not None)


@dataclass(frozen=True)
class Declaration:
    """What is asked for: packages by name and range, which a build locks to files and hashes.

    `python` are requirements as pip writes them, `npm` packages such as `dayjs@^1`. `files` are by
    their path in the workspace. `run` are shell commands, which a build runs there one after
    another, with the packages; what they leave in the workspace is of the template too. `start` is
    a shell command that each session runs first, and `ready` one that ends with 0 once that
    serves. `network` is one more list that holds for every run with it: it takes away, and gives
    nothing. So do `limits`. `build` are names of Python packages that are built from their source,
    which runs their code in a sandbox; of all others there are wheels only. `base` is what all of
    it is added to, as `providers.templates.base` has it, empty for this machine's programs; `apt`
    are packages of Debian, for a base that is an image.
    """

    python: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    run: tuple[str, ...] = ()
    start: str = ""
    ready: str = ""
    network: NetworkPolicy | None = None
    limits: Limits = field(default_factory=Limits)
    build: tuple[str, ...] = ()
    base: str = ""
    apt: tuple[str, ...] = ()

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Declaration:
        """Read a declaration of an API's body or a TOML file, without its name.

        Raises InvalidConfiguration naming the field.
        """
        unknown = sorted(set(document) - set(_FIELDS))
        if unknown:
            raise _refused(unknown[0], f"Unknown. The fields are {', '.join(_FIELDS)}.")
        if document.get("ready") and not document.get("start"):
            raise _refused("ready", "Needs a start command.")
        read = cls(
            python=_python(document.get("python", [])),
            npm=_npm(document.get("npm", [])),
            environment=_environment(document.get("environment", {})),
            files=_files(document.get("files", {})),
            run=tuple(_texts("run", document.get("run", []), MOST_COMMANDS, _COMMAND)),
            start=_text("start", document.get("start", "")),
            ready=_text("ready", document.get("ready", "")),
            network=_network(document.get("network")),
            limits=_limits(document.get("limits", {})),
            build=_build(document.get("build", [])),
            base=_base(document.get("base", "")),
            apt=_apt(document.get("apt", [])),
        )
        if read.apt and not read.base.startswith(bases.IMAGE):
            raise _refused("apt", "Needs a base that is an image, such as image:debian:12.")
        if read.build and read.base:
            raise _refused("build", "Packages are built for this machine's programs alone.")
        said = (*read.packages, read.environment, read.files, read.run, read.start, read.base)
        if not any(said):
            raise _refused(
                "python", "The template adds nothing. Name packages, files or variables."
            )
        return read

    def to_json(self) -> dict[str, Any]:
        """Return the document that `parse` reads."""
        network = self.network
        return {
            "python": list(self.python),
            "npm": list(self.npm),
            "environment": dict(self.environment),
            "files": {path: _file_to_json(content) for path, content in self.files.items()},
            "run": list(self.run),
            "start": self.start,
            "ready": self.ready,
            "network": network
            and {"mode": network.mode, "rules": [str(rule) for rule in network.rules]},
            "limits": self.limits.to_json(),
            "build": list(self.build),
            "base": self.base,
            "apt": list(self.apt),
        }

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the declaration, in hexadecimal."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def packages(self) -> tuple[str, ...]:
        """Return what a build has to resolve."""
        return (*self.python, *self.npm, *self.apt)

    @property
    def needs(self) -> frozenset[str]:
        """Return what of `bases.BASES` a provider has to have for it."""
        if not self.base:
            return frozenset()
        kind = bases.Base(self.base).kind
        return frozenset((kind, bases.APT) if self.apt else (kind,))


def check_name(name: str) -> None:
    """Raise InvalidConfiguration for what cannot name a template."""
    if not NAME.fullmatch(name):
        raise _refused(
            "name", "Use up to 63 small letters, digits, and . _ - between them, such as science."
        )
    if name == DEFAULT:
        raise _refused("name", f"{DEFAULT} is the template of the default packages.")


def _refused(field: str, message: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"{field}: {message}", field=field)


def _texts(field: str, value: Any, most: int, longest: int = _TEXT) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _refused(field, "Must be a list of texts.")
    if len(value) > most:
        raise _refused(field, f"At most {most} may be named.")
    if any(len(each) > longest or "\0" in each for each in value):
        raise _refused(field, f"A text has at most {longest} characters, and no NUL.")
    return [each.strip() for each in value if each.strip()]


def _python(value: Any) -> tuple[str, ...]:
    """Only names and ranges: an address, a path or an option would choose where code comes from."""
    found = []
    for line in _texts("python", value, MOST_REQUIREMENTS):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            raise _refused(
                "python", f"{line[:80]!r} is no requirement such as pandas>=2."
            ) from None
        if requirement.url:
            raise _refused(
                "python", f"{line[:80]!r} names an address. Name a package of the index."
            )
        found.append(str(requirement))
    return tuple(sorted(set(found)))


def _build(value: Any) -> tuple[str, ...]:
    found = _texts("build", value, MOST_REQUIREMENTS)
    for name in found:
        if not PACKAGE.fullmatch(name):
            raise _refused("build", f"{name[:80]!r} is no name of a package.")
    return tuple(sorted({canonicalize_name(name) for name in found}))


def is_npm_package(text: str) -> bool:
    """Tell whether a text is a package of a registry, such as `dayjs@^1`."""
    return len(text) <= _MOST_NPM and _NPM.fullmatch(text) is not None


def _npm(value: Any) -> tuple[str, ...]:
    found = []
    for line in _texts("npm", value, MOST_REQUIREMENTS):
        if not is_npm_package(line):
            raise _refused("npm", f"{line[:80]!r} is no package such as dayjs@^1.")
        found.append(line)
    return tuple(sorted(set(found)))


def _base(value: Any) -> str:
    text = _text("base", value)
    bases.check_name(text)
    return text


def _apt(value: Any) -> tuple[str, ...]:
    found = []
    for line in _texts("apt", value, MOST_REQUIREMENTS):
        if not _APT.fullmatch(line):
            raise _refused("apt", f"{line[:80]!r} is no package such as ffmpeg or jq=1.6-2.1.")
        found.append(line)
    return tuple(sorted(set(found)))


def _mapping(field: str, value: Any, most: int) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(part, str) for pair in value.items() for part in pair
    ):
        raise _refused(field, "Must be an object of texts.")
    if len(value) > most:
        raise _refused(field, f"At most {most} may be named.")
    return dict(sorted(value.items()))


def _environment(value: Any) -> dict[str, str]:
    found = _mapping("environment", value, MOST_VARIABLES)
    for name, text in found.items():
        if not _VARIABLE.fullmatch(name) or name in _RESERVED or name.startswith("COFFERDAM"):
            raise _refused("environment", f"{name[:80]!r} cannot be set. Choose another name.")
        if len(text) > 4 * _TEXT or "\0" in text:
            raise _refused("environment", f"{name} is too long, or has a NUL.")
    return found


def _files(value: Any) -> dict[str, bytes]:
    """Texts, or `{"base64": ...}` for what is none."""
    if not isinstance(value, Mapping) or not all(isinstance(path, str) for path in value):
        raise _refused("files", "Must be an object of texts by path.")
    if len(value) > MOST_FILES:
        raise _refused("files", f"At most {MOST_FILES} may be named.")
    found = {}
    for path, given in sorted(value.items()):
        if reason := problem(path):
            raise _refused("files", f"{path[:80]!r}: {reason}")
        try:
            if isinstance(given, Mapping) and set(given) == {"base64"}:
                found[path] = base64.b64decode(given["base64"], validate=True)
            else:
                found[path] = given.encode()
        except (AttributeError, TypeError, ValueError):
            raise _refused("files", f"{path[:80]!r}: Must be a text or base64.") from None
    if sum(map(len, found.values())) > FILES_BYTES:
        raise _refused("files", f"At most {FILES_BYTES} bytes in all.")
    return found


def _file_to_json(content: bytes) -> str | dict[str, str]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
    # No database stores it in a text.
    return {"base64": base64.b64encode(content).decode()} if "\0" in text else text


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > _TEXT or "\0" in value:
        raise _refused(field, f"Must be a text of at most {_TEXT} characters.")
    return value.strip()


def _network(value: Any) -> NetworkPolicy | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) - {"mode", "rules"}:
        raise _refused("network", "Must be an object with mode and rules.")
    rules = _texts("network", value.get("rules", []), MOST_REQUIREMENTS)
    try:
        return NetworkPolicy.parse(value.get("mode", "allowlist"), rules)
    except ValueError as error:
        raise _refused("network", str(error)) from None


def _limits(value: Any) -> Limits:
    names = tuple(each.name for each in fields(Limits))
    if not isinstance(value, Mapping) or set(value) - set(names):
        raise _refused("limits", f"Must be an object with {' and '.join(names)}, in seconds.")
    for seconds in value.values():
        if type(seconds) not in (int, float) or not 0 < seconds <= MOST_SECONDS:
            raise _refused("limits", f"Must be seconds, more than 0 and at most {MOST_SECONDS}.")
    return Limits(**{name: float(seconds) for name, seconds in value.items()})

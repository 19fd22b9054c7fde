"""The base of a template: whose programs its sandboxes have, and for which Python its packages are.

It is this machine's own, another interpreter of this machine, or an image. What it is lies in the
template's folder, so that the template's digest binds it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from providers.errors import InvalidConfiguration

Kind = Literal["", "interpreter", "image"]

FILE = "base.json"
# Of a template: the Debian packages that are put into its image.
PACKAGES = "debs"
IMAGE = "image:"
APT = "apt"
# What a provider says that its sandboxes can be based on.
BASES = ("interpreter", "image", APT)

# The guest is written for 3.9 or newer.
_INTERPRETER = re.compile(r"python3\.(9|[1-9][0-9])")
# Where sandboxes with this machine's programs find one.
_FOLDERS = ("/usr/bin", "/usr/local/bin")
_IMAGE_NAME = re.compile(r"\w[\w.:/@-]{0,299}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_RELEASE = re.compile(r"3\.(9|[1-9][0-9])")
_PROGRAM = re.compile(r"(/[\w.+-]{1,100}){1,20}", re.ASCII)
_LIBC = re.compile(r"(glibc|musl) ([0-9]{1,2})\.([0-9]{1,3})")
_MACHINE = re.compile(r"[a-z0-9_]{1,20}")
_PATTERNS = {
    "image": _DIGEST,
    "python": _RELEASE,
    "interpreter": _PROGRAM,
    "libc": _LIBC,
    "machine": _MACHINE,
    "look": re.compile(r"[0-9a-f]{32}"),
}
# Older names of what wheels are for, by the release of glibc.
_MANYLINUX = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@dataclass(frozen=True)
class Base:
    """What a template is based on. The name is as it was declared, empty for this machine.

    Of an image: `image` is its digest, `interpreter` the path of its Python of the release
    `python`, `libc` such as `glibc 2.36`. What is empty is not known. `look` is of one that is only
    looked at, and no other has it: what a name means now is found out anew each time.
    """

    name: str = ""
    image: str = ""
    python: str = ""
    interpreter: str = ""
    libc: str = ""
    machine: str = ""
    look: str = ""

    @property
    def kind(self) -> Kind:
        if not self.name:
            return ""
        return "image" if self.name.startswith(IMAGE) else "interpreter"

    @property
    def release(self) -> str:
        """Return the release of its Python, such as 3.12; "" for this machine, and where it is not
        known."""
        return self.name.removeprefix("python") if self.kind == "interpreter" else self.python

    @property
    def image_name(self) -> str:
        return self.name.removeprefix(IMAGE)

    def to_json(self) -> dict[str, str]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Base:
        """Read a base of a file or of a database. Raises InvalidConfiguration with field base."""
        names = set(cls.__dataclass_fields__)
        if (
            not isinstance(document, dict)
            or set(document) != names
            or not all(isinstance(each, str) for each in document.values())
        ):
            raise _refused("The base of the template cannot be read. Build the template again.")
        found = cls(**document)
        check_name(found.name)
        for name, pattern in _PATTERNS.items():
            said = document[name]
            if said and not pattern.fullmatch(said):
                raise _refused(f"{said[:80]!r} cannot be the {name} of a base.")
        return found

    @property
    def platforms(self) -> list[str] | None:
        """Return the platforms of the wheels that run in it, best first; None for this machine's.

        Without a libc there are none but those of every machine.
        """
        if self.kind != "image":
            return None
        known = _LIBC.fullmatch(self.libc)
        if known is None:
            return []
        newest = int(known[3])
        if known[1] == "musl":
            return [f"musllinux_{known[2]}_{each}_{self.machine}" for each in range(newest, -1, -1)]
        found = []
        for each in range(newest, 4, -1):
            found.append(f"manylinux_2_{each}_{self.machine}")
            if each in _MANYLINUX:
                found.append(f"{_MANYLINUX[each]}_{self.machine}")
        return [*found, f"linux_{self.machine}"]


OWN = Base()


def check_name(name: str) -> None:
    """Raise InvalidConfiguration for what cannot name a base."""
    if not name:
        return
    if name.startswith(IMAGE):
        if _IMAGE_NAME.fullmatch(name.removeprefix(IMAGE)):
            return
    elif _INTERPRETER.fullmatch(name):
        return
    raise _refused(
        f"{name[:80]!r} is no base. Name an interpreter of this machine, such as python3.12, or an "
        "image, such as image:python:3.12-slim."
    )


def find_interpreter(name: str) -> str:
    """Return the path of another interpreter of this machine, such as python3.12.

    Raises InvalidConfiguration where sandboxes have none of this name.
    """
    check_name(name)
    release = name.removeprefix("python")
    for folder in _FOLDERS:
        path = f"{folder}/{name}"
        if os.access(path, os.X_OK) and os.path.realpath(path).startswith("/usr/"):
            if _release_of(path) != release:
                continue
            return path
    raise _refused(
        f"This machine has no {name} in {' or '.join(_FOLDERS)}, where sandboxes find programs. "
        "Install it, or name another base."
    )


def read(folder: Path) -> Base:
    """Return the base of the template in a folder. Raises InvalidConfiguration."""
    try:
        document = json.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        return OWN
    except (OSError, ValueError, RecursionError):
        raise _refused("The base of the template cannot be read.") from None
    return Base.from_json(document)


def write(base: Base, folder: Path) -> None:
    """Write a base into the folder of its template, where it is not this machine."""
    if base.name:
        path = folder / FILE
        path.write_text(json.dumps(base.to_json(), sort_keys=True))
        path.chmod(0o644)


def needs(folder: Path) -> frozenset[str]:
    """Return what of BASES a provider has to have for the template in a folder. Raises
    InvalidConfiguration."""
    kind = read(folder).kind
    packages = (APT,) if (folder / PACKAGES).is_dir() else ()
    return frozenset((kind, *packages) if kind else packages)


def known_bases(said: object) -> frozenset[str]:
    """Return what a pool says of its bases, as far as it is known here."""
    listed = said if isinstance(said, list) else []
    return frozenset(each for each in BASES if each in listed)


def check_unchanged(base: Base, *digests: str) -> None:
    """Raise InvalidConfiguration where the image has another digest than any of these."""
    if base.image and base.image not in digests:
        raise InvalidConfiguration(
            f"template: The image {base.image_name} has changed since the template was built. "
            "Build it again.",
            field="template",
        )


def _release_of(path: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [path, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _refused(message: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"base: {message}", field="base")

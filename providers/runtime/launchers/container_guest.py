"""What every container of ours has in common, whichever engine starts it: the guest's modules, the
command of its first process, and what is known of its image.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from providers.errors import CreationFailed
from providers.languages import TABLE
from providers.runtime.launchers.guest_files import (
    INSIDE,
    PACKAGE,
    SOURCES,
    interpreter_options,
)

# How long a warm container, and one that has had its run, waits for a host that may be no more:
# longer than any pool keeps one.
ALONE_SECONDS = 25 * 3600.0

DEFAULT_IMAGES = {each.name: each.image for each in TABLE if each.image}
BUILD_COMMAND = "python manage.py build_images"
_NODE_MODULES = "/usr/share/nodejs"


class After:
    """Passes on what comes after `mark`, and at once where that is empty.

    What comes before it is dropped as it comes: the rest of a frame that was said to another.
    """

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._last = b""
        self.is_found = not mark

    def feed(self, data: bytes) -> bytes:
        if self.is_found:
            return data
        _, found, after = (self._last + data).partition(self._mark)
        if found:
            self.is_found = True
            self._last = b""
            return after
        self._last = (self._last + data)[1 - len(self._mark) :]
        return b""


@dataclass(frozen=True)
class Image:
    """What is known of an image of the engine's. `digest` is the registry's, or the image's own id.

    `user_processes` is the engine's bound on the processes of one user. `folder` has the files of a
    template, where the image has one. `packages` is the id of the pool's own image that has the
    template's packages of Debian.
    """

    id: str
    digest: str
    interpreters: Mapping[str, str | None]
    versions: Mapping[str, str]
    modules: bytes
    user_processes: int
    folder: str = ""
    packages: str = ""

    @property
    def made(self) -> list[str]:
        """Return the ids of the images that the pool has made for it, the upper one first."""
        return [each for each in (self.id if self.folder else "", self.packages) if each]


_RUNNER = f"{INSIDE}/{PACKAGE}/node_runner.js"

# Node gets its runner as an argument and gives it the name it would have. Without execArgv the
# program's own forks are not started in this way.
_NODE_LOADER = (
    "const Module = require('module'); const proxy = process.argv.pop(); "
    "const source = process.argv.pop(); process.execArgv = []; "
    f"const runner = new Module('{_RUNNER}', null); runner.filename = '{_RUNNER}'; "
    f"runner.paths = []; runner.proxy = proxy; runner._compile(source, '{_RUNNER}')"
)


def node_runner() -> list[str]:
    """The arguments that give Node.js the text of our runner in place of its path."""
    return ["-e", _NODE_LOADER, text_of("node_runner.js"), text_of("node_proxy.js")]


def text_of(name: str) -> str:
    """One of the guest's files."""
    return SOURCES[name].decode()


def sources() -> dict[str, tuple[str, str]]:
    """The guest's modules: what tracebacks call each, and its text."""
    return {
        stem: (f"{INSIDE}/{PACKAGE}/{name}", text_of(name))
        for name in SOURCES
        if (stem := name.removesuffix(".py")) != name
        and stem not in ("__init__", "boot", "probe", "zygote")
    }


def guest_command(image: Image, argument: str) -> list[str]:
    """Return the command of a container's first process, which has this argument."""
    python = image.interpreters["python"] or "python3"
    return [*interpreter_options(python), text_of("boot.py"), argument]


def probe_command() -> list[str]:
    """Return the command that tells what is in an image, and compiles the guest for it."""
    names = {each.name: each.interpreters for each in TABLE if each.interpreters}
    return ["python3", "-I", "-c", text_of("probe.py"), json.dumps(names)]


def probe_request(modules: Mapping[str, Any]) -> bytes:
    """Return what a probe reads that is to compile these modules."""
    request = json.dumps(modules).encode()
    return len(request).to_bytes(4, "big") + request


def read_probe(output: bytes) -> dict[str, Any]:
    """Return the answer of a probe. Raises CreationFailed."""
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError as error:
        raise CreationFailed(f"The probe printed no JSON: {output[:200]!r}") from error
    return answer


def image_of(name: str, digest: str, answer: Mapping[str, Any]) -> Image:
    """Return the image that a probe has seen."""
    return Image(
        id=name,
        digest=digest,
        interpreters=answer["interpreters"],
        versions=answer["versions"],
        modules=base64.b64decode(answer["modules"]),
        user_processes=answer["user_processes"],
    )


def environment_with(image: Image, environment: list[str]) -> list[str]:
    """Return the variables of a container of this image, which may have a template's files."""
    if not image.folder:
        return environment
    extended = [
        f"PATH={image.folder}/bin:{each.removeprefix('PATH=')}"
        if each.startswith("PATH=")
        else each
        for each in environment
    ]
    return [*extended, f"NODE_PATH={image.folder}/node_modules:/node_modules:{_NODE_MODULES}"]

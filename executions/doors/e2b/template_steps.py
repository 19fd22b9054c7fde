"""The steps of E2B's template builder as a declaration of a template.

E2B runs each step in an image, as root. Here packages are locked and no package's code runs as
root: what `pip_install` and `npm_install` ask for are packages of the declaration, and every other
command runs in a sandbox, whose workspace is the home folder.
"""

from __future__ import annotations

import io
import posixpath
import shlex
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executions.doors.e2b.connect import HOME, Refused, invalid
from providers.templates.base import IMAGE
from providers.templates.declaration import FILES_BYTES, Declaration
from providers.templates.store import python_release

# What makes no difference here.
_PIP_OPTIONS = frozenset(
    ("-q", "--quiet", "-U", "--upgrade", "--user", "--no-cache-dir", "--break-system-packages")
)
_NPM_OPTIONS = frozenset(
    ("-g", "--global", "-D", "--save", "--save-dev", "--no-audit", "--no-fund")
)
_IMAGES = ("e2bdev/base", "e2bdev/code-interpreter")

Uploads = Callable[[str], bytes | None]


class Steps:
    """What the steps so far come to."""

    def __init__(self, base: Declaration, uploads: Uploads) -> None:
        """`uploads` returns the tar archive that was uploaded for a hash."""
        self._uploads = uploads
        self._python, self._npm = list(base.python), list(base.npm)
        self._environment, self._files = dict(base.environment), dict(base.files)
        self._run, self._apt = list(base.run), list(base.apt)
        self._base, self._network = base.base, base.network
        self._folder = ""

    def add(self, step: Mapping[str, Any]) -> None:
        """Raises Refused with the reason."""
        args = step.get("args") or []
        if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
            raise invalid("args: Must be a list of strings.")
        kind = step.get("type")
        if kind == "ENV":
            self._environment.update(zip(args[::2], args[1::2], strict=False))
        elif kind == "WORKDIR" and args:
            self._folder = self._inside(args[0])
        elif kind == "COPY" and len(args) > 1:
            self._copy(args[0], args[1], step.get("filesHash"))
        elif kind == "RUN" and args:
            self._run_command(args[0])
        elif kind != "USER":
            # Sandboxes have one user.
            raise invalid(f"type: {str(kind)[:20]!r} is not known, or its args are missing.")

    def declaration(self, start: str, ready: str) -> Declaration:
        """Raises InvalidConfiguration."""
        made = Declaration(
            tuple(self._python),
            tuple(self._npm),
            self._environment,
            self._files,
            tuple(self._run),
            start,
            ready,
            self._network,
            base=self._base,
            apt=tuple(self._apt),
        )
        return Declaration.parse(made.to_json())

    def _inside(self, path: str) -> str:
        """Return a path as it is in the workspace. Raises Refused for one elsewhere."""
        for home in (f"{HOME}/", "/workspace/"):
            if f"{path}/".startswith(home):
                path = path[len(home) :]
                break
        else:
            path = path if path.startswith("/") else posixpath.join(self._folder, path)
        found = posixpath.normpath(path)
        if found.startswith(("/", "..")):
            raise invalid(f"{path[:100]!r} is not below {HOME}, where the files of templates are.")
        return "" if found == "." else found

    def _copy(self, source: str, target: str, digest: Any) -> None:
        archive = self._uploads(digest) if isinstance(digest, str) else None
        if archive is None:
            raise invalid(f"{source[:100]!r} was not uploaded.")
        members = _members(archive)
        at = self._inside(target)
        name = posixpath.normpath(source)
        if name in members and not target.endswith("/") and target not in (".", "./"):
            # A single file, under another name.
            self._put(at or name, members[name])
            return
        for path, content in members.items():
            inner = path.removeprefix(f"{name}/") if name != "." else path
            if inner == path and "/" in path and name not in (".", path):
                inner = posixpath.relpath(path, posixpath.dirname(name) or ".")
            elif path == name:
                inner = posixpath.basename(path)
            self._put(posixpath.join(at, inner), content)

    def _put(self, path: str, content: bytes) -> None:
        self._files[path] = content
        if sum(map(len, self._files.values())) > FILES_BYTES:
            raise invalid(f"The files of a template have at most {FILES_BYTES} bytes in all.")

    def _run_command(self, command: str) -> None:
        rest: list[str] = []
        for piece in command.split(" && "):
            try:
                words = shlex.split(piece)
            except ValueError:
                words = []
            # `pip` and the like may be called by their interpreter.
            if words[:2] in (["python", "-m"], ["python3", "-m"]):
                words = words[2:]
            if words[:2] in (["pip", "install"], ["pip3", "install"]):
                self._python += self._requirements(words[2:])
            elif words[:2] in (["npm", "install"], ["npm", "i"]) and len(words) > 2:
                self._npm += _npm_packages(words[2:])
            elif "apt-get" in words or "apt" in words[:2]:
                self._apt += self._debian_packages(words)
            else:
                rest.append(piece)
        if rest:
            enter = f"mkdir -p {shlex.quote(self._folder)} && cd {shlex.quote(self._folder)} && "
            self._run.append((enter if self._folder else "") + " && ".join(rest))

    def _debian_packages(self, words: Sequence[str]) -> list[str]:
        """Return the packages of `apt-get install`; there are none of `apt-get update`, which is
        done anyway."""
        if not self._base.startswith(IMAGE):
            raise invalid(
                "apt packages cannot be added: the base of sandboxes is a machine whose programs "
                "only its administrator changes. Use from_image() with an image that an "
                "administrator has allowed."
            )
        # What the SDK puts before it: variables, and sudo.
        plain = [word for word in words if "=" not in word or word[0].islower()]
        plain = plain[plain.index("apt-get" if "apt-get" in plain else "apt") + 1 :]
        named = [word for word in plain if not word.startswith("-")]
        if named[:1] == ["install"]:
            return named[1:]
        if named == ["update"]:
            return []
        raise invalid(f"{piece_of(words)}: only `apt-get update` and `apt-get install` are known.")

    def _requirements(self, words: Sequence[str]) -> list[str]:
        found = []
        wanted = iter(words)
        for word in wanted:
            if word in ("-r", "--requirement"):
                content = self._files.get(self._inside(next(wanted, "")))
                if content is None:
                    raise invalid(f"{piece_of(words)}: the file was not copied before.")
                lines = [line.partition(" #")[0].strip() for line in content.decode().splitlines()]
                found += [line for line in lines if line and not line.startswith("#")]
            elif word in _PIP_OPTIONS:
                continue
            elif word.startswith("-") or word in (".", "./"):
                raise invalid(
                    f"pip install {word[:40]}: Is not supported. Name packages of the index, with "
                    "their versions."
                )
            else:
                found.append(word)
        return found


def piece_of(words: Sequence[str]) -> str:
    """Return a command's words for a message."""
    return " ".join(words)[:100]


def _npm_packages(words: Sequence[str]) -> list[str]:
    for word in words:
        if word.startswith("-") and word not in _NPM_OPTIONS:
            raise invalid(f"npm install {word[:40]}: Is not supported. Name packages.")
    return [word for word in words if not word.startswith("-")]


def _members(archive: bytes) -> dict[str, bytes]:
    """Return the files of an uploaded archive by path. Raises Refused."""
    found = {}
    left = FILES_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as opened:
            for entry in opened:
                content = opened.extractfile(entry) if entry.isreg() else None
                if content is None:
                    continue
                left -= entry.size
                if left < 0:
                    raise invalid(f"The uploaded files have more than {FILES_BYTES} bytes.")
                found[posixpath.normpath(entry.name)] = content.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise invalid(f"The uploaded archive is damaged ({type(error).__name__}).") from None
    return found


def base_of(image: str, allowed: Sequence[str]) -> str:
    """Return the base of a template for an image: the image itself where it is one of the
    `allowed`, else this machine where that will do. Raises Refused."""
    if image in allowed:
        return f"{IMAGE}{image}"
    name, _, variant = image.partition(":")
    release = python_release()
    if name in _IMAGES or (name == "node" and variant in ("", "lts", "latest")):
        return ""
    version = variant.partition("-")[0]
    if name == "python" and (
        version in ("", "3", "latest", "slim") or f"{version}.".startswith(f"{release}.")
    ):
        return ""
    raise Refused(
        400,
        "invalid_argument",
        f"fromImage: {image[:80]!r} is not here. Templates begin with this machine's Python "
        f"{release} and Node.js: use from_base_image(), from_python_image('{release}') or "
        "from_node_image(). An administrator can add it to TEMPLATE_IMAGES.",
    )

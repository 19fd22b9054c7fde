"""The store of templates on this machine: each a folder by the digest of all that is in it.

A build fetches the files that a lock names, checks their hashes, unpacks and compiles them. Each
package is a layer, by the hash of its file. A template is made of links to the files of its layers,
so that packages of many templates are fetched, compiled and stored once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from providers.errors import InvalidConfiguration, SandboxError
from providers.runtime.guest.names import problem
from providers.runtime.launchers.guest_files import find_python
from providers.templates import base as bases
from providers.templates.base import OWN, Base
from providers.templates.files import (
    ENVIRONMENT,
    INTERPRETER,
    BuildFailed,
    Room,
    describe,
    environment_of,
    members,
    no_room,
    pack,
    unpack,
    unpack_workspace,
)

if TYPE_CHECKING:
    from providers.templates.declaration import Declaration
    from providers.templates.lock import Lock, LockedPackage

Fetch = Callable[[str, int], Iterator[bytes]]
Tell = Callable[[str], None]

FOLDER = "templates"
# Of a template: the files that its sandboxes begin with.
WORKSPACE = "workspace"
DEFAULT_MOST_BYTES = 4 << 30
_DIGEST = re.compile(r"[0-9a-f]{64}")

# The compiler reads what strangers have written.
_COMPILE_SECONDS, _COMPILE_BYTES = 240, 4 << 30
# Sandboxes have another user, who reads all of it.
_UMASK = 0o022

# Raised when what a layer has of the same file changes, such as what is left out of it.
_LAYOUT = "1"


@dataclass(frozen=True)
class Built:
    """A template's files. `python` is the release that they are for, such as 3.11."""

    digest: str
    size_bytes: int
    python: str
    licences: Mapping[str, str] = field(default_factory=dict)


class TemplateStore:
    """What is below `data_dir`. Several processes may use it at once."""

    def __init__(self, data_dir: Path, most_bytes: int = DEFAULT_MOST_BYTES) -> None:
        """`most_bytes` is the most that one template may take."""
        self._root = data_dir / FOLDER
        self._most_bytes = most_bytes

    def find(self, declaration: Declaration, lock: Lock, base: Base = OWN) -> Built | None:
        """Return what was built of the same declaration, lock and base, None where it is not
        there."""
        try:
            key = self._key_file(declaration, lock, base)
            found = Built(**json.loads(key.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return found if self.path(found.digest).is_dir() else None

    def build(
        self,
        declaration: Declaration,
        lock: Lock,
        fetch: Fetch,
        tell: Tell,
        workspace: IO[bytes] | None = None,
        base: Base = OWN,
    ) -> Built:
        """Build a template, or find it. Raises BuildFailed; nothing of the template is left then.

        `fetch` returns the content of an address, at most so many bytes. `tell` is given lines for
        the log; what it raises ends the build. `workspace` is a tar archive of the files that its
        sandboxes begin with.
        """
        if found := self.find(declaration, lock, base):
            tell(f"Nothing to do: {found.digest[:12]} has the same packages")
            return found
        try:
            return self._build(declaration, lock, fetch, tell, workspace, base)
        except BaseException as error:
            self._remove_unused_layers()
            if isinstance(error, OSError):
                raise BuildFailed(f"The template cannot be stored: {error.strerror}.") from error
            raise

    def _build(
        self,
        declaration: Declaration,
        lock: Lock,
        fetch: Fetch,
        tell: Tell,
        workspace: IO[bytes] | None,
        base: Base,
    ) -> Built:
        python = release_of(base)
        room = Room(self._most_bytes)
        with self._draft() as draft, self._lock("layers", fcntl.LOCK_SH):
            folder = draft / "template"
            folder.mkdir()
            for number, package in enumerate(lock.packages, 1):
                layer = self._layer(package, base, room, fetch, draft, tell)
                tell(f"[{number}/{len(lock.packages)}] {package.name} {package.version}")
                _link_tree(layer, folder, package)
            if workspace is not None:
                unpack_workspace(workspace, folder / WORKSPACE, room, tell)
            _add_programs(folder)
            bases.write(base, folder)
            digest, size = describe(folder)
            if size > self._most_bytes:
                # With what was compiled.
                raise no_room("template")
            built = Built(digest, size, python, _licences(folder, lock))
            final = self.path(digest)
            _add_interpreter(folder, base)
            try:
                folder.rename(final)
            except OSError:
                # Another build may have come to the same.
                if not final.is_dir():
                    raise
            key = draft / "key"
            key.write_text(json.dumps(asdict(built)))
            named = self._key_file(declaration, lock, base)
            named.parent.mkdir(exist_ok=True)
            key.rename(named)
        tell(f"Built {digest}: {size >> 20} MiB")
        return built

    def add_look(self, name: str) -> str:
        """Add a template without packages, in which a base is looked at; return its digest.

        Whoever has looked removes it. Raises BuildFailed.
        """
        base = Base(name, look=secrets.token_hex(16))
        try:
            with self._draft() as draft:
                folder = draft / "template"
                folder.mkdir()
                bases.write(base, folder)
                digest, _ = describe(folder)
                _add_interpreter(folder, base)
                folder.rename(self.path(digest))
        except OSError as error:
            raise BuildFailed(f"The template cannot be stored: {error.strerror}.") from error
        return digest

    def path(self, digest: str) -> Path:
        """Return the folder of a template. Raises ValueError for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError("no digest")
        return self._root / digest

    def folder(self, digest: str) -> Path | None:
        """Return the folder of a template that sandboxes can have here, None where there is
        none."""
        try:
            folder = self.path(digest)
            base = bases.read(folder)
        except (ValueError, InvalidConfiguration):
            return None
        if base.kind == "image":
            return folder if folder.is_dir() else None
        # Another one when the system's Python became another release.
        release = folder / "lib" / f"python{release_of(base)}"
        return folder if (folder / ENVIRONMENT).is_file() and release.is_dir() else None

    def workspace(self, digest: str) -> dict[str, bytes] | None:
        """Return the files that its sandboxes begin with, None where they are not here."""
        folder = self.path(digest) / WORKSPACE
        if not folder.parent.is_dir():
            return None
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(files)}

    def verify(self, digest: str) -> str:
        """Return what is wrong with a template's files, "" where all are as they were built."""
        folder = self.path(digest)
        if not folder.is_dir():
            return "The files are not on this machine."
        try:
            found, _ = describe(folder)
        except (BuildFailed, OSError) as error:
            return f"The files have changed: {error}"
        if found != digest:
            return f"The files have changed: they are {found} now."
        return "" if _has_interpreter(folder) else "The interpreter has changed."

    def pack(self, digest: str) -> Iterator[bytes]:
        """Return a tar archive of a template's files, for the store of another machine."""
        return pack(self.path(digest))

    def receive(self, digest: str, archive: IO[bytes]) -> None:
        """Store what the `pack` of another machine has sent. Raises BuildFailed for anything
        else."""
        final = self.path(digest)
        if final.is_dir():
            return
        with self._draft() as draft:
            folder = draft / "template"
            folder.mkdir()
            try:
                unpack(archive, folder, Room(self._most_bytes))
                found, _ = describe(folder)
            except OSError as error:
                raise BuildFailed(f"The template cannot be stored: {error.strerror}.") from error
            if found != digest:
                raise BuildFailed("The files of the template are not those of its digest.")
            try:
                base = bases.read(folder)
                release = release_of(base)
                if any(each.name != f"python{release}" for each in folder.glob("lib/python*")):
                    raise BuildFailed(
                        f"The template is for another Python than {release}, which its sandboxes "
                        "have here."
                    )
                _add_interpreter(folder, base)
            except InvalidConfiguration as error:
                raise BuildFailed(error.message) from None
            try:
                folder.rename(final)
            except OSError:
                if not final.is_dir():
                    raise

    def digests(self) -> list[str]:
        """Return the digests of the templates that are here."""
        try:
            return sorted(name for name in os.listdir(self._root) if _DIGEST.fullmatch(name))
        except FileNotFoundError:
            return []

    def remove(self, digest: str) -> None:
        """Remove a template, and the layers that no other template has."""
        folder = self.path(digest)
        with self._draft() as draft:
            try:
                # First out of the way: no sandbox is started from half of it.
                folder.rename(draft / "removed")
            except FileNotFoundError:
                return
        self._remove_unused_layers()

    def _remove_unused_layers(self) -> None:
        """Do nothing while another build may be about to use them: its end removes them."""
        try:
            with self._lock("layers", fcntl.LOCK_EX | fcntl.LOCK_NB):
                for layer in self._layers().iterdir():
                    files = (path for path in layer.rglob("*") if path.is_file())
                    # A file that a template has too has two names.
                    if all(path.stat().st_nlink == 1 for path in files):
                        shutil.rmtree(layer, ignore_errors=True)
        except BlockingIOError:
            return

    def _layers(self) -> Path:
        folder = self._root / "layers"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _key_file(self, declaration: Declaration, lock: Lock, base: Base) -> Path:
        known = json.dumps(base.to_json(), sort_keys=True)
        parts = (_LAYOUT, lock.digest, release_of(base), declaration.digest, known)
        return self._root / "keys" / hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _layer(
        self,
        package: LockedPackage,
        base: Base,
        room: Room,
        fetch: Fetch,
        draft: Path,
        tell: Tell,
    ) -> Path:
        """Return the folder with the files of a package. Raises BuildFailed."""
        python, compiler = release_of(base), _compiler_of(base)
        place = f"{package.place}\0"
        if package.kind == "python":
            place = f"{python}\0" if compiler else f"{python} text\0"
        named = f"{_LAYOUT}\0{package.kind}\0{package.name}\0{package.version}\0{place}"
        named += f"{package.algorithm}:{package.hash}"
        layer = self._layers() / hashlib.sha256(named.encode()).hexdigest()
        if layer.is_dir():
            room.take(sum(path.stat().st_size for path in members(layer)), package.name)
            return layer
        # Only here: what runs sandboxes has no use for it.
        from providers.templates import wheels

        tell(f"Fetching {package.file_name}")
        new = draft / "layer"
        new.mkdir()
        with tempfile.TemporaryFile(dir=draft) as file:
            _download(package, fetch, file, room.bytes)
            file.seek(0)
            wheels.unpack(file, package, new, python, room, tell, base.platforms)
        if package.kind == "python" and compiler:
            _compile(new, compiler, package)
        try:
            new.rename(layer)
        except OSError:
            if not layer.is_dir():
                raise
            shutil.rmtree(new)
        return layer

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """A folder that is gone afterwards, also when this process is killed: by the next build."""
        drafts = self._root / "drafts"
        drafts.mkdir(parents=True, exist_ok=True)
        for folder in (self._root, drafts):
            # Sandboxes have another user, who reads what lies below.
            folder.chmod(0o711)
        with self._lock("drafts", fcntl.LOCK_EX):
            for former in drafts.iterdir():
                _remove_unheld(former)
            draft = Path(tempfile.mkdtemp(dir=drafts))
            held = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            os.close(held)

    @contextmanager
    def _lock(self, name: str, how: int) -> Iterator[None]:
        fd = os.open(self._root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


@lru_cache(maxsize=1)
def python_release() -> str:
    """Return the release of the Python of sandboxes, such as 3.11."""
    python = find_python()
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        [python, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def release_of(base: Base) -> str:
    """Return the release of the Python that a template's packages are for, such as 3.11; "" for an
    image that is not known to have one."""
    return base.release if base.kind else python_release()


def _interpreter_of(base: Base) -> str:
    """Return the Python of a base, as its sandboxes see it. Raises InvalidConfiguration."""
    if base.kind == "interpreter":
        return bases.find_interpreter(base.name)
    return base.interpreter if base.kind else find_python()


def _compiler_of(base: Base) -> str:
    """Return a Python of this machine that compiles for the base, "" where there is none.

    Raises BuildFailed.
    """
    if base.kind == "image":
        return find_python() if base.python == python_release() else ""
    try:
        return _interpreter_of(base)
    except InvalidConfiguration as error:
        raise BuildFailed(error.message) from None


def _download(package: LockedPackage, fetch: Fetch, file: object, most_bytes: int) -> None:
    """Write the content of a package's address. Raises BuildFailed where it is not the locked."""
    digest, size = hashlib.new(package.algorithm), 0
    if package.size is not None and package.size > most_bytes:
        raise no_room(package.name)
    most = most_bytes if package.size is None else min(package.size, most_bytes)
    try:
        for piece in fetch(package.url, most):
            digest.update(piece)
            size += len(piece)
            if size > most:
                if package.size is None:
                    raise no_room(package.name)
                raise BuildFailed(f"{package.name}: The file is larger than its lock says.")
            file.write(piece)  # type: ignore[attr-defined]
    except BuildFailed:
        raise
    except SandboxError as error:
        raise BuildFailed(f"{package.name}: {error.message}") from error
    if digest.hexdigest() != package.hash:
        raise BuildFailed(
            f"{package.name}: The file {package.file_name!r} has another hash than its lock. It "
            "was changed after the lock was made, or on the way."
        )


def _compile(folder: Path, python: str, package: LockedPackage) -> None:
    """Compile the modules, as nothing can be written in a sandbox. Nothing is imported."""
    command = [
        *(python, "-I", "-m", "compileall", "-q", "-s", str(folder), "-p", "/"),
        *("--invalidation-mode", "unchecked-hash", str(folder)),
    ]

    limit = f'ulimit -v {_COMPILE_BYTES >> 10} && ulimit -t {_COMPILE_SECONDS} && exec "$@"'
    done = subprocess.run(
        ["/bin/sh", "-c", limit, "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env={"PATH": os.defpath},
        umask=_UMASK,
    )
    # 1: a module that cannot be compiled, such as one for another Python, is no reason to refuse.
    if done.returncode not in (0, 1):
        raise BuildFailed(f"{package.name}: The modules could not be compiled.")


def _link_tree(layer: Path, folder: Path, package: LockedPackage) -> None:
    for path, _, files in os.walk(layer):
        target = folder / Path(path).relative_to(layer)
        target.mkdir(parents=True, exist_ok=True)
        for name in files:
            try:
                os.link(Path(path) / name, target / name)
            except FileExistsError:
                # Packages share files such as those of a namespace. The first one keeps its own.
                continue


def _add_programs(folder: Path) -> None:
    """Make the programs of npm packages, which npm has in `.bin` as links."""
    modules = folder / "node_modules"
    for described in sorted((*modules.glob("*/package.json"), *modules.glob("@*/*/package.json"))):
        for name, path in _programs_of(described):
            target = described.parent / path
            program = folder / "bin" / name
            if not _PROGRAM.fullmatch(name) or problem(path) or not target.is_file():
                continue
            if program.exists() or name.startswith(("python", "node")):
                continue
            program.parent.mkdir(exist_ok=True)
            place = shlex.quote(os.path.relpath(target, program.parent))
            program.write_text(f'#!/bin/sh\nexec node "$(dirname "$0")"/{place} "$@"\n')
            program.chmod(0o755)


def _programs_of(described: Path) -> list[tuple[str, str]]:
    """Return name and path of each program that a package.json declares."""
    try:
        document = json.loads(described.read_bytes())
        programs = document.get("bin") or {}
        if isinstance(programs, str):
            programs = {document["name"].rpartition("/")[2]: programs}
        return [(name, path.removeprefix("./")) for name, path in programs.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _add_interpreter(folder: Path, base: Base) -> None:
    """Make it a virtual environment of the Python that its sandboxes have. Raises
    InvalidConfiguration."""
    if real := _interpreter_of(base):
        (folder / "bin").mkdir(exist_ok=True)
        site = folder / "lib" / f"python{release_of(base)}" / "site-packages"
        site.mkdir(parents=True, exist_ok=True)
        for name in INTERPRETER:
            (folder / "bin" / name).symlink_to(real)
        (folder / ENVIRONMENT).write_text(environment_of(real))
        (folder / ENVIRONMENT).chmod(0o644)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)


def _has_interpreter(folder: Path) -> bool:
    try:
        real = _interpreter_of(bases.read(folder))
        return not real or (
            (folder / ENVIRONMENT).read_text() == environment_of(real)
            and all(os.readlink(folder / "bin" / name) == real for name in INTERPRETER)
        )
    except (OSError, InvalidConfiguration):
        return False


def _licences(folder: Path, lock: Lock) -> dict[str, str]:
    """Return what each package says of its licence, by name."""
    # Only here: see `wheels`.
    import email.parser

    found: dict[str, str] = {}
    for path in sorted(folder.glob("lib/python*/site-packages/*.dist-info/METADATA")):
        said = email.parser.HeaderParser().parsestr(path.read_text(errors="replace")[:65536])
        name = str(said.get("Name", "")).lower().replace("_", "-")
        classified = [
            str(each).rpartition("::")[2].strip()
            for each in said.get_all("Classifier", [])
            if str(each).startswith("License ::")
        ]
        text = said.get("License-Expression") or ", ".join(classified) or said.get("License", "")
        found[name] = str(text).strip().splitlines()[0][:200] if str(text).strip() else ""
    for package in lock.packages:
        if package.kind == "npm":
            try:
                document = json.loads((folder / package.place / "package.json").read_bytes())
            except (OSError, ValueError, RecursionError):
                continue
            said_licence = document.get("license", "") if isinstance(document, dict) else ""
            found[package.name] = said_licence[:200] if isinstance(said_licence, str) else ""
    return found


def _remove_unheld(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)

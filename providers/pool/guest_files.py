"""The guest's code as a folder that sandboxes see read-only, compiled for their interpreter."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from providers.errors import ProviderUnavailable
from providers.pool import etc_folder

SOURCE = Path(__file__).resolve().parent.parent / "guest"

# Where the folder is seen inside; the package's own name keeps out of user code's way.
INSIDE = "/cofferdam"
PACKAGE = "_cofferdam"
NOTHING = "nothing"


def boot(folder: str, module: str) -> str:
    """Python code that starts the guest's `module` from `folder`."""
    return (
        f"import sys; sys.path.insert(0, {folder!r}); from {PACKAGE} import {module}; "
        f"del sys.path[0]; {module}.main()"
    )


def interpreter_options(python: str) -> list[str]:
    """The command up to the code it runs: isolated, no site-packages yet, UTF-8 everywhere."""
    return [python, "-I", "-S", "-X", "utf8", "-c"]


def find_python() -> str:
    """The interpreter for sandboxes: the distribution's, which starts fastest, else our own."""
    for candidate in ("/usr/bin/python3", os.path.realpath(sys.executable)):
        if os.access(candidate, os.X_OK):
            return candidate
    raise ProviderUnavailable("No Python interpreter for sandboxes: install python3.")


def find_program(name: str, hidden: Sequence[Path]) -> str | None:
    """Path of a program that sandboxes see, None where there is none."""
    folders = ("/usr/bin", "/bin", "/usr/local/bin")
    seen = [folder for folder in folders if not any(map(Path(folder).is_relative_to, hidden))]
    return shutil.which(name, path=":".join(seen))


def program_folders(python: str) -> list[str]:
    """The folders of this machine that sandboxes see whole: the programs and their libraries."""
    if python.startswith("/usr/"):
        return ["/usr"]
    return ["/usr", str(Path(python).parent.parent)]


def hidden_folders(python: str, data_dir: Path) -> list[Path]:
    """The folders that sandboxes do not see although they are among the programs.

    What an administrator has put into /usr/local is nobody's business inside, unless it is the
    interpreter itself.
    """
    hidden = [data_dir]
    if not os.path.realpath(python).startswith("/usr/local/"):
        hidden.append(Path("/usr/local"))
    shown = program_folders(python)
    return [
        path
        for path in hidden
        if any(map(path.is_relative_to, shown))
        and not any(other in path.parents for other in hidden)
    ]


def install_guest(python: str, folder: Path, hidden: Sequence[Path] = ()) -> Path:
    """Copy the guest below `folder` and compile it with `python`. Once per version of either.

    Without compiled files every sandbox would compile the guest anew when it starts. Beside it is
    the /etc of sandboxes, which names nothing that is `hidden`.
    """
    sources = sorted(path for path in SOURCE.iterdir() if path.suffix in (".py", ".js"))
    digest = hashlib.sha256(os.path.realpath(python).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(etc_folder.digest(hidden))
    final = folder / f"guest-{digest.hexdigest()[:16]}"
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="guest-", dir=folder))
    etc_folder.write(draft / "etc", hidden)
    (draft / NOTHING / "folder").mkdir(parents=True)
    (draft / NOTHING / "file").touch()
    package = draft / PACKAGE
    package.mkdir()
    for path in sources:
        shutil.copyfile(path, package / path.name)
    subprocess.run(
        [python, "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", package],
        check=True,
        capture_output=True,
    )
    for path in (draft, *draft.rglob("*")):
        if path.is_symlink():
            continue
        path.chmod(0o755 if path.is_dir() else 0o644)
    try:
        draft.rename(final)
    except OSError:
        if not final.exists():
            raise
        shutil.rmtree(draft)
    return final

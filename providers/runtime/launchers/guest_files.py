"""The guest's code as a folder that sandboxes see read-only, compiled for their interpreter.

In it is also the /etc of sandboxes that see this machine's programs. The machine's own would tell
names, addresses and habits of the machine; without any, programs fail: Debian's matplotlib wants a
matplotlibrc, `getpass` a user, some libraries the links of update-alternatives.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from providers.errors import ProviderUnavailable
from providers.languages import language_of
from providers.runtime.guest.root import group, passwd
from providers.runtime.pool.template import OWN_PROGRAMS

# By name, and read with this module: whoever gives up a privilege after that, or is given another
# user, may not be able to enter the folder of the project.
SOURCES = {
    path.name: path.read_bytes()
    for path in sorted((Path(__file__).resolve().parent.parent / "guest").iterdir())
    if path.suffix in (".py", ".js", ".sh")
}
# Runners that are given to their interpreter as text, in a module of their own: guest/texts.py.
_TEXTS = {
    name: SOURCES.pop(name).decode()
    for name in list(SOURCES)
    if name.endswith(("_context.js", "_context.sh"))
}
SOURCES["texts.py"] = f"TEXTS = {_TEXTS!r}\n".encode()

# Where the folder is seen inside; the package's own name keeps out of user code's way.
INSIDE = "/cofferdam"
PACKAGE = "_cofferdam"
NOTHING = "nothing"
# Where the files of a template are seen that is based on an image.
TEMPLATE = f"{INSIDE}/template"

# Other folders lie over these inside.
_TAKEN = ("/tmp", "/dev", "/proc", "/etc", "/workspace")


def boot(folder: str, module: str) -> str:
    """Python code that starts the guest's `module` from `folder`."""
    return (
        f"import sys; sys.path.insert(0, {folder!r}); from {PACKAGE} import {module}; "
        f"del sys.path[0]; {module}.main()"
    )


def interpreter_options(python: str) -> list[str]:
    """The command up to the code it runs: isolated, no site-packages yet, UTF-8 everywhere."""
    return [python, "-I", "-S", "-X", "utf8", "-c"]


def find_python(chosen: str = "") -> str:
    """The interpreter for sandboxes: the distribution's, which starts fastest, else our own.

    `chosen` is that of a virtual environment, which sandboxes then see whole. Raises
    ProviderUnavailable with the remedy.
    """
    if chosen:
        _check_chosen(Path(chosen))
        return chosen
    for candidate in ("/usr/bin/python3", os.path.realpath(sys.executable)):
        if os.access(candidate, os.X_OK):
            return candidate
    raise ProviderUnavailable("No Python interpreter for sandboxes: install python3.")


def _check_chosen(python: Path) -> None:
    """Only a virtual environment is shown whole: around another program anything may lie."""
    environment = python.parent.parent
    problem = ""
    if not python.is_absolute() or not os.access(python, os.X_OK):
        problem = "is no program"
    elif not (environment / "pyvenv.cfg").is_file():
        problem = "is not the interpreter of a virtual environment"
    elif any(map(environment.is_relative_to, _TAKEN)) or any(
        map(Path(os.path.realpath(python)).is_relative_to, _TAKEN)
    ):
        problem = f"lies where sandboxes have folders of their own ({', '.join(_TAKEN)})"
    if problem:
        raise ProviderUnavailable(
            f"SANDBOX_LOCAL_PYTHON: {str(python)!r} {problem}. Name one such as "
            "/opt/venv/bin/python, or none."
        )


def find_program(language: str, hidden: Sequence[Path] | None = None) -> str | None:
    """Path of a language's interpreter, None where there is none.

    Of those that sandboxes see, to whom these folders are `hidden`; without that, of our own path.
    """
    path = None
    if hidden is not None:
        folders = ("/usr/bin", "/bin", "/usr/local/bin")
        seen = [folder for folder in folders if not any(map(Path(folder).is_relative_to, hidden))]
        path = ":".join(seen)
    known = language_of(language)
    commands = known.interpreters if known else ()
    return next((found for name in commands if (found := shutil.which(name, path=path))), None)


def program_folders(python: str) -> list[str]:
    """The folders of this machine that sandboxes see whole: the programs and their libraries."""
    # An environment's interpreter is a link to the one that has the standard library.
    folders = [str(Path(path).parent.parent) for path in (python, os.path.realpath(python))]
    return ["/usr", *dict.fromkeys(each for each in folders if not each.startswith("/usr"))]


def search_path(
    python: str,
    guest: str = INSIDE,
    system: str = f"/usr/local/bin:/usr/bin:/bin:{OWN_PROGRAMS}/bin",
) -> str:
    """Return PATH, by which `python` and `python3` are the interpreter that programs have."""
    own = [] if python.startswith("/usr/") else [str(Path(python).parent)]
    return ":".join((*own, system, f"{guest}/bin"))


def node_path(python: str) -> list[tuple[str, str]]:
    """Return the variable by which Node.js finds the packages of an environment, if it has any."""
    folder = Path(python).parent.parent / "node_modules"
    return [("NODE_PATH", str(folder))] if folder.is_dir() else []


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
    digest = hashlib.sha256(f"{python}\0{os.path.realpath(python)}".encode())
    for name, content in SOURCES.items():
        digest.update(name.encode() + content)
    digest.update(TEMPLATE.encode() + etc_digest(hidden))
    final = folder / f"guest-{digest.hexdigest()[:16]}"
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="guest-", dir=folder))
    try:
        _write(draft, python, hidden)
        draft.rename(final)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        # Somebody else may have been faster.
        if not (isinstance(error, OSError) and final.exists()):
            raise
    return final


def _write(draft: Path, python: str, hidden: Sequence[Path]) -> None:
    """Raises OSError and CalledProcessError."""
    write_etc(draft / "etc", hidden)
    (draft / NOTHING / "folder").mkdir(parents=True)
    (draft / NOTHING / "file").touch()
    (draft / Path(TEMPLATE).name).mkdir()
    # A distribution's interpreter is called python3 alone.
    (draft / "bin").mkdir()
    (draft / "bin" / "python").symlink_to(python)
    package = draft / PACKAGE
    package.mkdir()
    for name, content in SOURCES.items():
        (package / name).write_bytes(content)
    subprocess.run(
        [python, "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", package],
        check=True,
        capture_output=True,
    )
    for path in (draft, *draft.rglob("*")):
        if path.is_symlink():
            continue
        path.chmod(0o755 if path.is_dir() else 0o644)


# Who a program is where every sandbox has the same user.
NOBODY = 65534

# What a program installs goes into a folder of its own in the workspace. Nothing that it downloads
# is kept there a second time.
PIP_CONFIGURATION = """[global]
break-system-packages = true
cache-dir = /tmp/.cache/pip
disable-pip-version-check = true
no-warn-script-location = true
retries = 2
root-user-action = ignore
"""

_FILES = {
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
    "matplotlibrc": "# What is not named here is matplotlib's own default.\nbackend: agg\n",
    "pip.conf": PIP_CONFIGURATION,
    "uv/uv.toml": "cache-dir = '/tmp/.cache/uv'\n",
    "fonts/fonts.conf": "<?xml version='1.0'?>\n"
    "<!DOCTYPE fontconfig SYSTEM 'urn:fontconfig:fonts.dtd'>\n"
    "<fontconfig><dir>/usr/share/fonts</dir><cachedir>/tmp/.fontconfig</cachedir></fontconfig>\n",
}


_AUTHORITIES = "ssl/certs/ca-certificates.crt"


def etc_digest(hidden: Iterable[Path], etc: Path = Path("/etc")) -> bytes:
    """Return what changes whenever `write_etc` would write something else."""
    seen = [passwd(NOBODY), group(NOBODY), repr(sorted(_FILES.items())), repr(sorted(hidden))]
    for name in ("alternatives", "ld.so.cache", _AUTHORITIES):
        path = etc / name
        seen.append(repr(path.stat().st_mtime_ns) if path.exists() else "")
    return "\0".join(seen).encode()


def write_etc(folder: Path, hidden: Iterable[Path], etc: Path = Path("/etc")) -> None:
    """Fill `folder`. Nothing in it names what is below one of the `hidden` folders."""
    hidden = list(hidden)
    for name, text in {
        **_FILES,
        "passwd": passwd(NOBODY),
        "group": group(NOBODY),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _copy_links(etc / "alternatives", folder / "alternatives", hidden)
    _write_linker_cache(etc, folder, hidden)
    _copy_authorities(etc, folder)


def _copy_authorities(etc: Path, folder: Path) -> None:
    """The certificates that programs trust, as one file and by the names that OpenSSL looks for."""
    bundle = etc / _AUTHORITIES
    if not bundle.is_file():
        return
    target = folder / _AUTHORITIES
    target.parent.mkdir(parents=True)
    shutil.copyfile(bundle, target)
    public = Path("/usr/share/ca-certificates")
    for link in sorted(bundle.parent.iterdir()):
        if link.is_symlink() and Path(os.path.realpath(link)).is_relative_to(public):
            (target.parent / link.name).symlink_to(os.readlink(link))


def _copy_links(source: Path, target: Path, hidden: list[Path]) -> None:
    """The links of update-alternatives, as far as they lead to programs that sandboxes see."""
    target.mkdir()
    if not source.is_dir():
        return
    for link in source.iterdir():
        if not link.is_symlink():
            continue
        leads_to = Path(os.readlink(link))
        if leads_to.is_relative_to("/usr") and not any(map(leads_to.is_relative_to, hidden)):
            (target / link.name).symlink_to(leads_to)


def _write_linker_cache(etc: Path, folder: Path, hidden: list[Path]) -> None:
    """Where the dynamic linker finds libraries. Without the cache it knows its own folders only."""
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is None:
        return
    named: list[str] = []
    for path in (etc / "ld.so.conf", *sorted(etc.glob("ld.so.conf.d/*.conf"))):
        if path.is_file():
            named += [line.strip() for line in path.read_text(errors="replace").splitlines()]
    folders = [
        line
        for line in named
        if line.startswith("/") and not any(map(Path(line).is_relative_to, hidden))
    ]
    listed = folder / "ld.so.conf"
    listed.write_text("".join(f"{line}\n" for line in folders))
    # -X: it changes no link of the machine's.
    command = [ldconfig, "-X", "-C", str(folder / "ld.so.cache"), "-f", str(listed)]
    subprocess.run(command, check=False, capture_output=True)

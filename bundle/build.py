"""`make bundle`: one archive that installs the committed project where there is no network.

It holds the project as it was committed, the locked requirements and the locked packages for Python
programs as wheels, Debian's package of bubblewrap with what that depends on, the sandbox images
where a Docker engine has them, and `install.sh`. Static files come with the wheels and the project:
there is no collecting step. It installs on the same kind of machine as it was made on: processor,
Python, Debian release.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
IMAGES = ("cofferdam/python", "cofferdam/nodejs")
_PIP = (
    sys.executable,
    "-m",
    "pip",
    "--disable-pip-version-check",
    "wheel",
    "--quiet",
    "--use-pep517",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=PROJECT / "var", help="folder of the archive"
    )
    parser.add_argument("--wheels", type=Path, help="a folder that has all of them already")
    parser.add_argument("--packages", type=Path, help="the same of the packages for programs")
    parser.add_argument("--without-packages", action="store_true", help="without those")
    parser.add_argument("--without-images", action="store_true", help="even if Docker has them")
    arguments = parser.parse_args()
    commit = _said("git", "rev-parse", "HEAD")
    if _said("git", "status", "--porcelain"):
        print("What is not committed is left out.", file=sys.stderr)
    arguments.output.mkdir(parents=True, exist_ok=True)
    name = f"cofferdam-{commit[:12]}"
    with tempfile.TemporaryDirectory(prefix="cofferdam-bundle-", dir=arguments.output) as made:
        stage = Path(made) / name
        _project(stage / "project", commit)
        when = _said("git", "show", "--no-patch", "--format=%ct", commit)
        _wheels(stage, arguments.wheels, when)
        if not arguments.without_packages:
            _packages(stage, arguments.packages)
        _debian_packages(stage / "debian")
        if not arguments.without_images:
            _images(stage / "images")
        shutil.copy(stage / "project" / "bundle" / "install.sh", stage / "install.sh")
        (stage / "made-for.json").write_text(json.dumps(_machine() | {"commit": commit}) + "\n")
        _sums(stage)
        target = arguments.output / f"{name}.tar"
        _archive(stage, target, int(when))
    print(target)


def _machine() -> dict[str, str]:
    """What the wheels and packages fit."""
    return {
        "machine": platform.machine(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "system": platform.freedesktop_os_release().get("VERSION_CODENAME", ""),
    }


def _project(folder: Path, commit: str) -> None:
    folder.mkdir(parents=True)
    packed = folder.with_suffix(".tar")
    _run("git", "archive", f"--output={packed}", commit)
    _run("tar", "--extract", "--file", str(packed), "--directory", str(folder))
    packed.unlink()


def _wheels(stage: Path, known: Path | None, when: str) -> None:
    """The locked requirements, and pip itself to install them with; `wheels.txt` locks them anew.

    What comes as a source is built here, so that its hash is another than the lock's. `known` is a
    folder where an earlier call has left all of them, and is believed.
    """
    folder = stage / "wheels"
    if known is not None:
        shutil.copytree(known, folder)
    else:
        lock = stage / "project" / "requirements.txt"
        into = ("--wheel-dir", str(folder))
        epoch = {"SOURCE_DATE_EPOCH": when}
        _run(*_PIP, *into, "--no-deps", "--require-hashes", "-r", str(lock), extra=epoch)
        _run(*_PIP, *into, "--no-deps", "pip", extra=epoch)
    lines = [f"{_requirement(path)} --hash=sha256:{_digest(path)}\n" for path in folder.iterdir()]
    (stage / "wheels.txt").write_text("".join(sorted(lines)))


def _packages(stage: Path, known: Path | None) -> None:
    """What `manage.py packages` installs, by its locks. `known` is a folder that has all of it."""
    folder = stage / "packages"
    if known is not None:
        shutil.copytree(known, folder)
        return
    lock = stage / "project" / "providers" / "local" / "packages.txt"
    download = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
    options = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
    _run(*download, *options, "--dest", str(folder), "-r", str(lock))
    script = (
        "import sys; from pathlib import Path; from providers.local.node_packages import fetch_all;"
        " fetch_all(Path(sys.argv[1]))"
    )
    _run(sys.executable, "-c", script, str(folder / "node"), cwd=stage / "project")


def _requirement(wheel: Path) -> str:
    name, version, *_ = wheel.name.split("-")
    return f"{name}=={version}"


def _debian_packages(folder: Path) -> None:
    """bubblewrap and all that it depends on, as the machine's own package sources have them."""
    folder.mkdir()
    depends = ("--recurse", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks")
    others = ("--no-replaces", "--no-enhances")
    lines = _said("apt-cache", "depends", *depends, *others, "bubblewrap").splitlines()
    # A name without indentation is a package; one in brackets is provided by others.
    names = sorted({line for line in lines if line and not line.startswith((" ", "|", "<"))})
    _run("apt-get", "download", "--quiet", *names, cwd=folder)


def _images(folder: Path) -> None:
    # Nothing else here needs a package.
    import docker

    try:
        found = [(name, docker.from_env().images.get(name)) for name in IMAGES]
    except docker.errors.DockerException as error:
        print(f"The bundle is made without sandbox images: {error}", file=sys.stderr)
        return
    folder.mkdir()
    for name, image in found:
        target = folder / f"{name.rpartition('/')[2]}.tar.gz"
        with target.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            for chunk in image.save(named=name):
                packed.write(chunk)


def _sums(stage: Path) -> None:
    lines = []
    for path in sorted(path for path in stage.rglob("*") if path.is_file()):
        lines.append(f"{_digest(path)}  {path.relative_to(stage)}\n")
    (stage / "SHA256SUMS").write_text("".join(lines))


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _archive(stage: Path, target: Path, when: int) -> None:
    """The same bytes for the same content: sorted, nobody's, of the time of the commit."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = when
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    draft = target.with_suffix(".draft")
    # Nearly all of it is compressed already.
    with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in (stage, *sorted(stage.rglob("*"))):
            name = str(path.relative_to(stage.parent))
            archive.add(path, name, recursive=False, filter=plain)
    draft.replace(target)


def _said(*command: str) -> str:
    return _run(*command).stdout.decode().strip()


def _run(
    *command: str, cwd: Path = PROJECT, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | (extra or {})
    try:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is not installed.") from None
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done


if __name__ == "__main__":
    main()

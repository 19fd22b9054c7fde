"""Builds the sandboxes' images without a registry: a Debian system made by debootstrap."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker

from providers.errors import CreationFailed, ProviderUnavailable
from providers.self_managed.images.build import (
    FOLDER,
    PYTHON_LABEL,
    RECIPE_LABEL,
    REPOSITORY,
    Tell,
    image_id,
    import_root,
    install_packages,
    recipe,
    run,
)

SUITE = "bookworm"
PYTHON = "3.11"

_PACKAGES = (
    *("python3", "python-is-python3", "nodejs", "git"),
    *("fonts-wqy-zenhei", "ca-certificates"),
)
_REQUIREMENTS = FOLDER / "python" / "requirements.txt"
_MATPLOTLIBRC = FOLDER / "python" / "matplotlibrc"
_NODE_PACKAGES = FOLDER / "nodejs" / "package.json"
_SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
_ENVIRONMENT = {
    "MATPLOTLIBRC": "/usr/share/cofferdam/matplotlibrc",
    "NODE_PATH": "/node_modules:/usr/share/nodejs",
}
_USELESS = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists", "var/cache")


def build_from_debian(client: docker.DockerClient, *, rebuild: bool, tell: Tell) -> str:
    """One image with Python and Node.js in it, under both names. Needs root. Returns its id."""
    names = [f"{REPOSITORY}/{language}" for language in ("python", "nodejs")]
    made_from = recipe(
        "debian", SUITE, platform.machine(), Path(__file__), _REQUIREMENTS, _MATPLOTLIBRC,
        _NODE_PACKAGES,
    )  # fmt: skip
    found = {image_id(client, name, made_from) for name in names}
    if not rebuild and None not in found:
        tell(f"{' and '.join(names)} are up to date")
        return str(found.pop())
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise ProviderUnavailable(
            "--from-debian needs root and debootstrap (apt-get install debootstrap)."
        )
    with tempfile.TemporaryDirectory(prefix="cofferdam-root-") as folder:
        work = Path(folder)
        root = work / "root"
        _make_root(root, work, tell)
        labels = {RECIPE_LABEL: made_from, PYTHON_LABEL: PYTHON}
        tell("Importing the image")
        return import_root(client, root, names, labels, _ENVIRONMENT, tell)


def _make_root(root: Path, work: Path, tell: Tell) -> None:
    with_npm = shutil.which("npm") is not None
    packages = _PACKAGES if with_npm else (*_PACKAGES, "node-axios", "node-typescript")
    tell(f"Making a Debian {SUITE} system and fetching packages")
    # The three are independent and mostly wait for the network.
    with ThreadPoolExecutor(3) as threads:
        jobs = [
            threads.submit(_debootstrap, root, packages),
            threads.submit(install_packages, _REQUIREMENTS, work / "site", PYTHON),
        ]
        if with_npm:
            jobs.append(threads.submit(_install_node_packages, work / "node"))
        for job in jobs:
            job.result()
    shutil.copytree(work / "site", root / _SITE, dirs_exist_ok=True)
    if with_npm:
        shutil.copytree(work / "node" / "node_modules", root / "node_modules", symlinks=True)
    for name in _USELESS:
        shutil.rmtree(root / name, ignore_errors=True)
    tell("Compiling modules and building the font cache")
    # Nothing can be written in a sandbox, so what is not compiled here would be every time.
    inside = ["chroot", str(root), "/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    run([*inside, "python3", "-m", "compileall", "-q", "-j", "0", f"/{_SITE}"], "compiling failed")
    # Where programs look that were written for E2B's sandboxes.
    (root / "home" / "user").symlink_to("/workspace")
    folder = root / "usr/share/cofferdam"
    folder.mkdir(parents=True)
    shutil.copyfile(_MATPLOTLIBRC, folder / "matplotlibrc")
    look = "import matplotlib.font_manager"
    cache = "MPLCONFIGDIR=/usr/share/cofferdam/tmp/.matplotlib"
    run([*inside, cache, "python3", "-c", look], "matplotlib does not work in the image")


def _debootstrap(root: Path, packages: tuple[str, ...]) -> None:
    run(
        [
            *("debootstrap", "--variant=minbase", f"--include={','.join(packages)}"),
            *(SUITE, str(root), *find_mirror()),
        ],
        "debootstrap failed",
    )


def _install_node_packages(folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(_NODE_PACKAGES, folder / "package.json")
    options = ["--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    run(["npm", "install", *options], "npm failed", cwd=folder)
    if not (folder / "node_modules" / "axios").is_dir():
        wanted = json.loads(_NODE_PACKAGES.read_text())["dependencies"]
        raise CreationFailed(f"npm did not install {wanted}.")


def find_mirror(sources: Path = Path("/etc/apt")) -> list[str]:
    """The Debian mirror this machine uses itself; none where debootstrap has to know one."""
    for path in (sources / "sources.list", *sorted(sources.glob("sources.list.d/*"))):
        if not path.is_file():
            continue
        text = path.read_text()
        for block in text.split("\n\n"):
            suites = re.search(r"^Suites:.*$", block, re.MULTILINE)
            uri = re.search(r"^URIs:\s*(\S+)", block, re.MULTILINE)
            if suites and uri and SUITE in suites[0].split():
                return [uri[1]]
        if line := re.search(rf"^deb\s+(?:\[.*?\]\s+)?(\S+)\s+{SUITE}\s", text, re.MULTILINE):
            return [line[1]]
    return []

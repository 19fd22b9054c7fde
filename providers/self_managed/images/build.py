"""Builds the sandboxes' images with a registry, and images of one's own on top of them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
from packaging.markers import Marker

from providers.errors import CreationFailed, InvalidConfiguration, ProviderUnavailable
from providers.runtime.launchers.guest_files import PIP_CONFIGURATION

FOLDER = Path(__file__).resolve().parent
# The packages of the Python image: the lock that `manage.py packages` installs.
LOCK = FOLDER.parents[1] / "local" / "packages.txt"
# The same of the Node.js image.
NODE_LOCK = LOCK.with_name("node_packages.json")
REPOSITORY = "cofferdam"

# What an image was made from, so that one that is up to date is not built again.
RECIPE_LABEL = "cofferdam.recipe"
# The Python release inside, such as 3.11: packages are installed for it from outside.
PYTHON_LABEL = "cofferdam.python"

Tell = Callable[[str], None]


def recipe(*inputs: str | bytes | Path) -> str:
    """A digest of everything that goes into an image: texts, and files' contents."""
    digest = hashlib.sha256()
    for part in inputs:
        content = part.read_bytes() if isinstance(part, Path) else part
        content = content.encode() if isinstance(content, str) else content
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def image_id(client: docker.DockerClient, name: str, made_from: str = "") -> str | None:
    """The id of an image if the engine has it, and has it from this recipe if one is given."""
    try:
        image = client.images.get(name)
    except docker.errors.ImageNotFound:
        return None
    if made_from and image.labels.get(RECIPE_LABEL) != made_from:
        return None
    return str(image.id)


def build_from_registry(
    client: docker.DockerClient, language: str, *, rebuild: bool, tell: Tell
) -> str:
    """Build a language's image from its Dockerfile. Returns the image's id."""
    files = {path.name: path.read_bytes() for path in (FOLDER / language).iterdir()}
    if language == "python":
        files |= {"requirements.txt": LOCK.read_bytes(), "pip.conf": PIP_CONFIGURATION.encode()}
    if language == "nodejs":
        files |= {"package-lock.json": NODE_LOCK.read_bytes()}
    made_from = recipe("dockerfile", *(part for file in sorted(files.items()) for part in file))
    name = f"{REPOSITORY}/{language}"
    if not rebuild and (found := image_id(client, name, made_from)):
        tell(f"{name} is up to date")
        return found
    return build(client, make_context(files), name, {RECIPE_LABEL: made_from}, tell)


def build_template(
    client: docker.DockerClient, name: str, requirements: Path, base: str, *, tell: Tell
) -> str:
    """An image with the packages of `requirements` on top of `base`. Returns its id.

    Where the base says which Python it has, the packages are installed into it from outside, as
    binary wheels; else its own pip installs them.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,62}", name):
        raise InvalidConfiguration(
            f"{name!r} is not a valid template name: use small letters, digits, and _ . - between "
            "them.",
            field="template",
        )
    if not requirements.is_file():
        raise InvalidConfiguration(f"There is no file {requirements}.", field="requirements")
    try:
        labels: Mapping[str, str] = client.images.get(base).labels
    except docker.errors.ImageNotFound:
        raise InvalidConfiguration(
            f"The engine has no image {base}. Build it first: python manage.py build_images",
            field="base",
        ) from None
    version = labels.get(PYTHON_LABEL)
    text = requirements.read_bytes()
    if version:
        tell(f"Installing {requirements} for Python {version}")
        with tempfile.TemporaryDirectory() as folder:
            install_packages(requirements, Path(folder), version)
            packages = _tar_of(Path(folder))
        target = f"/usr/local/lib/python{version}/dist-packages/"
        dockerfile = f"FROM {base}\nADD packages.tar {target}\n"
        context = make_context({"Dockerfile": dockerfile.encode(), "packages.tar": packages})
    else:
        dockerfile = (
            f"FROM {base}\nUSER 0\nCOPY requirements.txt /requirements.txt\n"
            "RUN pip install --no-cache-dir -r /requirements.txt && rm /requirements.txt\n"
        )
        context = make_context({"Dockerfile": dockerfile.encode(), "requirements.txt": text})
    made_from = recipe("template", dockerfile, text)
    return build(client, context, f"{REPOSITORY}/{name}", {RECIPE_LABEL: made_from}, tell)


def build(
    client: docker.DockerClient,
    context: io.BytesIO,
    name: str,
    labels: Mapping[str, str],
    tell: Tell,
) -> str:
    """Have the engine build a context. Returns the image's id. Raises CreationFailed."""
    steps = client.api.build(
        fileobj=context, custom_context=True, tag=name, labels=dict(labels), rm=True, decode=True
    )
    follow(steps, name, tell)
    return str(client.images.get(name).id)


def follow(steps: Iterable[Mapping[str, Any]], name: str, tell: Tell) -> None:
    """Tell what the engine says while it works. Raises CreationFailed with its complaint."""
    for step in steps:
        if "error" in step:
            raise CreationFailed(f"The image {name} was not built: {step['error'].strip()}")
        if line := str(step.get("stream", "")).strip():
            tell(line)


def make_context(files: Mapping[str, bytes]) -> io.BytesIO:
    """A build context in memory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(content))
    buffer.seek(0)
    return buffer


def install_packages(requirements: Path, target: Path, version: str) -> None:
    """Install binary wheels for another Python into a folder. Raises CreationFailed."""
    machine = platform.machine()
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in (36, 34, 31, 28, 27, 24, 17)]
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--requirement", str(requirements), "--target", str(target), "--no-compile"),
        *("--python-version", version, "--implementation", "cp", "--only-binary", ":all:"),
    ]
    for name in (*platforms, f"manylinux2014_{machine}", f"linux_{machine}"):
        command += ["--platform", name]
    run(command, f"the packages of {requirements.name} were not installed")
    # They are a third of the size, and nobody runs them in a sandbox.
    for tests in [path for path in target.glob("**/tests") if path.is_dir()]:
        run(["rm", "-rf", str(tests)], "")


def lock_for(lock: str, version: str) -> str:
    """Return what a lock has for one Python release, such as 3.11, without its conditions.

    pip holds these against the interpreter that it runs in, whichever it installs for.
    """
    environment = {"python_version": version, "python_full_version": f"{version}.0"}
    lines = []
    for block in re.split(r"\n(?=\S)", lock):
        head, _, hashes = block.partition("\n")
        requirement, _, condition = head.removesuffix(" \\").partition(" ; ")
        if not condition or Marker(condition).evaluate(environment):
            lines.append(f"{requirement} \\\n{hashes}" if hashes else requirement)
    return "\n".join(lines)


def run(command: list[str], problem: str, **options: Any) -> None:
    """Run a tool. Raises CreationFailed with `problem` and the end of what it printed."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options
    )
    if done.returncode != 0:
        raise CreationFailed(f"{problem}: {(done.stderr or done.stdout).strip()[-1500:]}")


def import_root(
    client: docker.DockerClient,
    root: Path,
    names: Iterable[str],
    labels: Mapping[str, str],
    environment: Mapping[str, str],
    tell: Tell,
) -> str:
    """Make a folder with a whole system in it an image, under several names. Returns its id."""
    changes = [f"LABEL {name}={value}" for name, value in labels.items()]
    changes += [f"ENV {name}={value}" for name, value in environment.items()]
    first, *others = names
    left_out = [f"--exclude=./{name}/*" for name in ("proc", "sys", "dev", "tmp", "run")]
    command = ["tar", "--numeric-owner", "-C", str(root), *left_out, "-c", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tar:
        answer = client.api.import_image_from_data(
            tar.stdout, repository=first, tag="latest", changes=changes
        )
    if tar.returncode != 0:
        raise CreationFailed(f"The image {first} was not built: tar failed.")
    follow((json.loads(line) for line in answer.splitlines()), first, tell)
    image = client.images.get(first)
    for name in others:
        image.tag(name)
    return str(image.id)


def _tar_of(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".", filter=_owned_by_root)
    return buffer.getvalue()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


SUITE = "bookworm"
PYTHON = "3.11"

_PACKAGES = (
    *("python3", "python-is-python3", "nodejs", "git"),
    *("fonts-wqy-zenhei", "ca-certificates"),
)
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
        "debian", SUITE, platform.machine(), Path(__file__), LOCK, PIP_CONFIGURATION,
        _MATPLOTLIBRC, _NODE_PACKAGES, NODE_LOCK,
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
    lock = work / LOCK.name
    lock.write_text(lock_for(LOCK.read_text(), PYTHON))
    # The three are independent and mostly wait for the network.
    with ThreadPoolExecutor(3) as threads:
        jobs = [
            threads.submit(_debootstrap, root, packages),
            threads.submit(install_packages, lock, work / "site", PYTHON),
        ]
        if with_npm:
            jobs.append(threads.submit(_install_node_packages, work / "node"))
        for job in jobs:
            job.result()
    _move_commands(work / "site" / "bin", root / "usr/local/bin")
    shutil.copytree(work / "site", root / _SITE, dirs_exist_ok=True)
    (root / "etc/pip.conf").write_text(PIP_CONFIGURATION)
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


def _move_commands(made: Path, target: Path) -> None:
    """Have commands be found that were made for the interpreter of this machine."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("uv", "uvx"):
        shutil.copy(made / name, target / name)
    for name in ("pip", "pip3"):
        (target / name).write_text('#!/bin/sh\nexec python3 -m pip "$@"\n')
        (target / name).chmod(0o755)
    shutil.rmtree(made)


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
    shutil.copyfile(NODE_LOCK, folder / "package-lock.json")
    options = ["--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund"]
    run(["npm", "ci", *options], "npm failed", cwd=folder)
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

"""Builds the sandboxes' images with a registry, and images of one's own on top of them."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import docker

from providers.errors import CreationFailed, InvalidConfiguration

FOLDER = Path(__file__).resolve().parent
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
    folder = FOLDER / language
    files = sorted(path for path in folder.iterdir() if path.is_file())
    made_from = recipe("dockerfile", *files)
    name = f"{REPOSITORY}/{language}"
    if not rebuild and (found := image_id(client, name, made_from)):
        tell(f"{name} is up to date")
        return found
    context = make_context({path.name: path.read_bytes() for path in files})
    return build(client, context, name, {RECIPE_LABEL: made_from}, tell)


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

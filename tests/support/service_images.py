"""The images of web, worker and pool, built by deploy/Containerfile, as folders to run Pods from.

The engine builds them as docs/deployment/containers.md says it is done without an index, on the
image of the sandboxes, which is a Debian that the engine has. Two minutes on an idle machine are
longer than a test has on a busy one: run as a module, this fills the engine's cache before the tests.
A folder is a mount of the image's layers, so nothing is copied. What a runtime makes to mount
something over lies in a layer above.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.support.processes import ROOT
from tests.support.required import missing

BASE = "cofferdam/python"
LOCKS = ("requirements.txt", "deploy/pool-requirements.txt")
# By the name in the manifests: the stage of the Containerfile, None for the last.
STAGES = {"cofferdam/service": None, "cofferdam/pool": "pool"}


@dataclass(frozen=True)
class ServiceImage:
    """An image: its files, and what its configuration says of the process."""

    root: Path
    config: dict[str, Any]


@pytest.fixture(scope="session")
def service_images(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServiceImage]]:
    """Both images by their name, mounted until the end of the session."""
    if os.geteuid() != 0:
        missing("mounting an image needs root")
    folder = tmp_path_factory.mktemp("images")
    mounted: list[Path] = []
    try:
        found = {}
        for name, image in _build_images(engine, folder / "context").items():
            root = folder / name.rpartition("/")[2]
            _mount(image.attrs["GraphDriver"], root)
            mounted.append(root)
            found[name] = ServiceImage(root, image.attrs["Config"])
        yield found
    finally:
        for root in mounted:
            subprocess.run(["umount", str(root)], check=True)
        shutil.rmtree(folder)


def _build_images(engine: docker.DockerClient, context: Path) -> dict[str, Any]:
    _make_context(context, _wheels())
    return {name: _build(engine, context, name, stage) for name, stage in STAGES.items()}


def _make_context(context: Path, wheels: Path) -> None:
    """What .dockerignore lets through, which is all that the builder gets."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line.startswith("!") or line == "!wheels":
            continue
        source, target = ROOT / line[1:], context / line[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    shutil.copy(ROOT / "deploy/Containerfile", context / "deploy/Containerfile")
    shutil.copytree(wheels, context / "wheels")


def _wheels() -> Path:
    """The packages of both images, fetched once for these locks, and what builds three of them."""
    digest = hashlib.sha256(b"".join((ROOT / lock).read_bytes() for lock in LOCKS))
    folder = ROOT / ".pytest_cache/d/wheels" / digest.hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            draft = folder.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)
            for wanted in (
                *(("--require-hashes", "--requirement", lock) for lock in LOCKS),
                ("setuptools",),
            ):
                subprocess.run(
                    [sys.executable, "-m", "pip", "download", "-qq", "--no-deps",
                     "--disable-pip-version-check", "--dest", str(draft), *wanted],
                    check=True, cwd=ROOT,
                )  # fmt: skip
            draft.rename(folder)
    return folder


def _build(engine: docker.DockerClient, context: Path, name: str, stage: str | None) -> Any:
    try:
        image, _ = engine.images.build(
            path=str(context),
            dockerfile="deploy/Containerfile",
            target=stage,
            tag=name.replace("/", "-tests/"),
            buildargs={"BASE": BASE, "PIP_OPTIONS": "--no-index"},
            # The engine has no bridge; packages of Debian come over the machine's network.
            network_mode="host",
            forcerm=True,
        )
    except docker.errors.BuildError as error:
        output = "".join(line.get("stream", "") for line in error.build_log)
        raise AssertionError(f"{name} was not built: {error}\n{output[-4000:]}") from None
    return image


def _mount(driver: dict[str, Any], root: Path) -> None:
    if driver["Name"] != "overlay2":
        missing("the engine does not keep its images as overlays")
    layers = [driver["Data"]["UpperDir"], *driver["Data"].get("LowerDir", "").split(":")]
    above = {name: root.with_name(f"{root.name}-{name}") for name in ("upper", "work")}
    for folder in (root, *above.values()):
        folder.mkdir()
        folder.chmod(0o755)
    options = [f"lowerdir={':'.join(layers)}", *(f"{name}dir={above[name]}" for name in above)]
    subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", ",".join(options), str(root)], check=True
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        _build_images(docker.from_env(), Path(folder) / "context")

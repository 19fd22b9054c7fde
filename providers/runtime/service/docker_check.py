"""Whether this machine has a Docker engine that the pool can use. Asked at start, not per run."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

DEFAULT_SOCKET = Path("/var/run/docker.sock")
ANSWER_SECONDS = 2


class Docker(Enum):
    """What there is. Each value tells an operator what to do about it."""

    READY = ""
    ABSENT = "No Docker engine answers."
    FORBIDDEN = "A Docker engine is running, but this user has no permission to use it."
    WITHOUT_IMAGES = (
        "Docker answers, but the images for sandboxes are missing. Build them with "
        "`python manage.py build_images`, then start again. Until then code runs in the sandboxes "
        "of the local provider."
    )


def find_docker() -> Docker:
    """Ask the engine that DOCKER_HOST names, or the usual socket, for the Python image."""
    named = os.environ.get("DOCKER_HOST", "")
    path = Path(named.removeprefix("unix://")) if named.startswith("unix://") else DEFAULT_SOCKET
    if not named or named.startswith("unix://"):
        # Without a socket the client, which is large, is not loaded.
        if not path.exists():
            return Docker.ABSENT
        if _is_forbidden(path):
            return Docker.FORBIDDEN
    import docker
    import requests
    from docker.errors import DockerException, ImageNotFound

    from providers.runtime.launchers.docker import DEFAULT_IMAGES

    try:
        client = docker.from_env(timeout=ANSWER_SECONDS)
        try:
            client.images.get(DEFAULT_IMAGES["python"])
        finally:
            client.close()
    except ImageNotFound:
        return Docker.WITHOUT_IMAGES
    except (DockerException, requests.RequestException, OSError):
        return Docker.ABSENT
    return Docker.READY


def engine_runtimes() -> frozenset[str]:
    """The names of the runtimes that the engine has, none where no engine answers."""
    if find_docker() not in (Docker.READY, Docker.WITHOUT_IMAGES):
        return frozenset()
    import docker
    import requests
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=ANSWER_SECONDS)
        try:
            return frozenset(client.info()["Runtimes"])
        finally:
            client.close()
    except (DockerException, requests.RequestException, OSError):
        return frozenset()


def _is_forbidden(path: Path) -> bool:
    return os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK)

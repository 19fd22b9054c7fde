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
    WITHOUT_IMAGES = (
        "Docker answers, but the images for sandboxes are missing. Build them with "
        "`python manage.py build_images`, then start again. Until then code runs in the sandboxes "
        "of the local provider."
    )


def find_docker() -> Docker:
    """Ask the engine that DOCKER_HOST names, or the usual socket, for the Python image."""
    if not os.environ.get("DOCKER_HOST") and not DEFAULT_SOCKET.exists():
        return Docker.ABSENT
    import docker
    import requests
    from docker.errors import DockerException, ImageNotFound

    from providers.pool.launchers.docker import DEFAULT_IMAGES

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

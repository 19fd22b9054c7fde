"""What the Docker launcher is told, and what it knows of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from providers.languages import TABLE
from providers.runtime.pool.remembered import Memory

# How long a warm container, and one that has had its run, waits for a host that may be no more:
# longer than any pool keeps one.
ALONE_SECONDS = 25 * 3600.0

DEFAULT_IMAGES = {each.name: each.image for each in TABLE if each.image}
BUILD_COMMAND = "python manage.py build_images"

GVISOR_REMEDY = (
    "Install gVisor's runsc, register it in the engine's daemon.json as the runtime `runsc` with "
    "the arguments --network=none and --platform=systrap, and restart the engine."
)


@dataclass(frozen=True)
class DockerSettings:
    """Which engine, what it starts, and who the containers belong to.

    `images` maps a language or a template's name to an image. `runtime` is the name of one of the
    engine's runtimes, or "auto": runsc where the engine has it and it works, else runc. Pools
    with different `pool_id`s never touch each other's containers. With a `memory` kept ones outlive
    this process. Without `filter_system_calls`
    only the engine's own seccomp profile holds.
    """

    base_url: str | None = None
    images: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_IMAGES))
    runtime: str = "auto"
    require_gvisor: bool = False
    filter_system_calls: bool = True
    pool_id: str = "default"
    memory: Memory | None = None


@dataclass(frozen=True)
class Image:
    """What is known of an image of the engine's. `digest` is the registry's, or the image's own id.

    `user_processes` is the engine's bound on the processes of one user.
    """

    id: str
    digest: str
    interpreters: Mapping[str, str | None]
    versions: Mapping[str, str]
    modules: bytes
    user_processes: int

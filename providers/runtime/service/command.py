"""The pool service as a command: its arguments, and what it reads of the settings."""

from __future__ import annotations

import logging
import re
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from providers.addresses import is_loopback
from providers.errors import InvalidConfiguration
from providers.isolation import NONE, meets
from providers.launcher_names import KINDS
from providers.options import Options, use_options
from providers.runtime.launchers.images import ImageStore
from providers.runtime.pool.state_store import StateStore
from providers.runtime.service.docker_check import Docker, find_docker
from providers.runtime.service.http import AllowedAddresses
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.serve import UNUSED_SECONDS, ServiceOptions, serve
from providers.runtime.service.settings import (
    IMAGE_FIELDS,
    ServiceSettings,
    parse_size,
    parse_span,
    usual_capacity,
)
from providers.runtime.service.unix_socket import socket_path

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?", re.ASCII)

HELP = (
    "Run the pool service. It keeps warm sandboxes and runs code in them over HTTP, for the "
    "self_managed provider and for RAGFlow's POST /run. On SIGTERM it waits until running code "
    "has finished, then ends with all its sandboxes."
)


class PoolOptions(Options, Protocol):
    """What the command reads; docs/settings.md says what each means."""

    @property
    def DATA_DIR(self) -> Path: ...

    @property
    def MINIMUM_ISOLATION(self) -> str: ...

    @property
    def KUBERNETES_NAMESPACE(self) -> str: ...

    @property
    def NETWORK_ALLOWED_ADDRESSES(self) -> Sequence[str]: ...

    @property
    def NETWORK_CA_FILE(self) -> str: ...

    @property
    def POOL_ALLOWED_ADDRESSES(self) -> Sequence[str]: ...

    @property
    def POOL_GVISOR_PLATFORM(self) -> str: ...

    @property
    def POOL_IMAGES(self) -> Mapping[str, str]: ...

    @property
    def POOL_LAUNCHER(self) -> str: ...

    @property
    def POOL_MEMORY(self) -> str: ...

    @property
    def POOL_NAME(self) -> str: ...

    @property
    def POOL_SIZE(self) -> int: ...

    @property
    def POOL_TIMEOUT(self) -> str: ...

    @property
    def POOL_TOKEN(self) -> str: ...

    @property
    def SANDBOX_LOCAL_PYTHON(self) -> str: ...

    @property
    def SANDBOX_LOCAL_UNISOLATED(self) -> bool: ...

    @property
    def SHUTDOWN_GRACE_SECONDS(self) -> int: ...


def add_arguments(parser: ArgumentParser, settings: PoolOptions) -> None:
    """Declare the arguments, whose defaults are the settings."""
    parser.add_argument(
        "--launcher",
        choices=KINDS,
        default=settings.POOL_LAUNCHER,
        help="the isolation tool; auto: the first that works on this machine (POOL_LAUNCHER)",
    )
    parser.add_argument(
        "--host", default=settings.POOL_HOST, help="address to listen on (POOL_HOST)"
    )
    parser.add_argument(
        "--port", type=int, default=settings.POOL_PORT, help="port to listen on (POOL_PORT)"
    )
    parser.add_argument(
        "--token-file", type=Path, help="file with the bearer token (POOL_TOKEN, POOL_TOKEN_FILE)"
    )
    parser.add_argument(
        "--socket",
        action="store_true",
        help="also listen on a socket in the data directory, for the local provider",
    )
    parser.add_argument("--no-port", action="store_true", help="listen only on that socket")
    parser.add_argument(
        "--until-unused",
        action="store_true",
        help=f"end after {UNUSED_SECONDS} seconds in which no process has used it",
    )


def run(settings: PoolOptions, arguments: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Serve until SIGTERM. `say` is told where, once connections are taken.

    Raises SandboxError for what cannot be used, with its remedy.
    """
    use_options(settings)
    host, no_port = arguments["host"], arguments["no_port"]
    port = 0 if no_port else arguments["port"]
    pool_id = "sessions" if no_port else settings.POOL_NAME or f"port-{port}"
    check_pool_name(pool_id)
    token = _token(settings, arguments["token_file"])
    choice = LauncherChoice(
        arguments["launcher"],
        settings.DATA_DIR,
        pool_id,
        settings.POOL_GVISOR_PLATFORM,
        settings.MINIMUM_ISOLATION,
        settings.SANDBOX_LOCAL_PYTHON,
        StateStore(
            settings.DATA_DIR,
            pool_id,
            has_copies=bool(token) and arguments["launcher"] == "kubernetes",
        ),
        namespace=settings.KUBERNETES_NAMESPACE,
        key=token,
        allow_unisolated=settings.SANDBOX_LOCAL_UNISOLATED
        and meets(NONE, settings.MINIMUM_ISOLATION),
    )
    options = ServiceOptions(
        host,
        port,
        choice,
        _first_settings(settings, arguments["launcher"]),
        AllowedAddresses.of(settings.POOL_ALLOWED_ADDRESSES, only_loopback=is_loopback(host)),
        token,
        settings.SHUTDOWN_GRACE_SECONDS,
        socket_path(settings.DATA_DIR) if arguments["socket"] or no_port else None,
        arguments["until_unused"],
        tuple(settings.NETWORK_ALLOWED_ADDRESSES),
        settings.NETWORK_CA_FILE,
    )
    serve(options, lambda address: say(f"Pool: {address} (Ctrl-C ends it)"))


def check_pool_name(name: str) -> None:
    """Raise InvalidConfiguration for a name that no folder, label or object can have."""
    if not _NAME.fullmatch(name):
        raise InvalidConfiguration(
            f"POOL_NAME: {name!r} is not a name of at most 50 lower-case letters, digits and `-`.",
            field="POOL_NAME",
        )


def _first_settings(settings: PoolOptions, launcher: str) -> ServiceSettings:
    try:
        memory_bytes = parse_size(settings.POOL_MEMORY)
        images: dict[str, Any] = {
            IMAGE_FIELDS[language]: name for language, name in settings.POOL_IMAGES.items() if name
        }
        if launcher not in ("docker", "kubernetes") and (
            launcher != "auto" or find_docker() is not Docker.READY
        ):
            # They are RAGFlow's names for images of an engine, which the launcher has no use for.
            images = _imported(images, ImageStore(settings.DATA_DIR))
        capacity = usual_capacity(
            memory_bytes, settings.POOL_SIZE, shares_memory=launcher != "kubernetes"
        )
        return ServiceSettings(
            pool_size=min(settings.POOL_SIZE, capacity),
            max_sandboxes=capacity,
            max_memory=memory_bytes,
            timeout=parse_span(settings.POOL_TIMEOUT),
            **images,
        )
    except ValueError as error:
        raise InvalidConfiguration(f"SANDBOX_MAX_MEMORY, SANDBOX_TIMEOUT: {error}.") from None


def _imported(images: Mapping[str, str], store: ImageStore) -> dict[str, Any]:
    known = {image.name for image in store.list()}
    if ignored := sorted(set(images.values()) - known):
        logger.warning(
            "ignored images, which were not imported (manage.py pool_images): %s",
            ", ".join(ignored),
        )
    return {field: name for field, name in images.items() if name in known}


def _token(settings: PoolOptions, path: Path | None) -> str:
    if path is None:
        return settings.POOL_TOKEN
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"--token-file: cannot read {path}: {error}") from None
    if not token:
        raise InvalidConfiguration(f"--token-file: {path} is empty.")
    return token

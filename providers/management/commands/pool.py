"""The pool service: warm sandboxes over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.addresses import is_loopback
from providers.errors import SandboxError
from providers.launcher_names import KINDS
from providers.options import use_options
from providers.runtime.pool.state_store import StateStore
from providers.runtime.service.http import AllowedAddresses
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.serve import ServiceOptions, serve
from providers.runtime.service.settings import (
    ServiceSettings,
    parse_size,
    parse_span,
    usual_capacity,
)
from providers.runtime.service.unix_socket import socket_path


class Command(BaseCommand):
    help = (
        "Run the pool service. It keeps warm sandboxes and runs code in them over HTTP, for the "
        "self_managed provider and for RAGFlow's POST /run. On SIGTERM it waits until running code "
        "has finished, then ends with all its sandboxes."
    )
    # It uses neither the database nor a key.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
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
            "--token-file",
            type=Path,
            help="file with the bearer token (POOL_TOKEN, POOL_TOKEN_FILE)",
        )

        parser.add_argument(
            "--socket",
            action="store_true",
            help="also listen on a socket in the data directory, for the local provider's sessions",
        )
        parser.add_argument("--no-port", action="store_true", help="listen only on that socket")

    def handle(
        self,
        *args: Any,
        launcher: str,
        host: str,
        port: int,
        token_file: Path | None,
        socket: bool,
        no_port: bool,
        **options: Any,
    ) -> None:
        # No app is loaded here that would do so.
        use_options(settings)
        pool_id = "sessions" if no_port else f"port-{port}"
        choice = LauncherChoice(
            launcher,
            settings.DATA_DIR,
            pool_id,
            settings.POOL_GVISOR_PLATFORM,
            settings.MINIMUM_ISOLATION,
            settings.SANDBOX_LOCAL_PYTHON,
            StateStore(settings.DATA_DIR, pool_id),
        )
        service_options = ServiceOptions(
            host,
            0 if no_port else port,
            choice,
            _first_settings(),
            _allowed(host),
            _token(token_file),
            settings.SHUTDOWN_GRACE_SECONDS,
            socket_path(settings.DATA_DIR) if socket or no_port else None,
        )
        try:
            serve(service_options, self._announce)
        except SandboxError as error:
            raise CommandError(error.message) from None

    def _announce(self, address: str) -> None:
        self.stdout.write(f"Pool: {address} (Ctrl-C ends it)")
        self.stdout.flush()


def _allowed(host: str) -> AllowedAddresses:
    return AllowedAddresses.of(settings.POOL_ALLOWED_ADDRESSES, only_loopback=is_loopback(host))


def _first_settings() -> ServiceSettings:
    try:
        memory_bytes = parse_size(settings.POOL_MEMORY)
        capacity = usual_capacity(memory_bytes, settings.POOL_SIZE)
        return ServiceSettings(
            pool_size=min(settings.POOL_SIZE, capacity),
            max_sandboxes=capacity,
            memory_bytes=memory_bytes,
            timeout=parse_span(settings.POOL_TIMEOUT),
            images={language: name for language, name in settings.POOL_IMAGES.items() if name},
        )
    except ValueError as error:
        raise CommandError(f"SANDBOX_MAX_MEMORY, SANDBOX_TIMEOUT: {error}.") from None


def _token(path: Path | None) -> str:
    if path is None:
        return str(settings.POOL_TOKEN)
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--token-file: cannot read {path}: {error}") from None
    if not token:
        raise CommandError(f"--token-file: {path} is empty.")
    return token

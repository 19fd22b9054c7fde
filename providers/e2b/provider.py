"""Runs code in E2B's cloud sandboxes, through the official e2b-code-interpreter SDK."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from providers.addresses import given_addresses
from providers.base import (
    ARGUMENTS,
    ARTIFACTS,
    COMMANDS,
    ENVIRONMENT,
    FILES,
    KEPT,
    PROCESSES,
    STREAMING,
    WATCHING,
    WORKSPACE,
)
from providers.e2b.schema import ADDRESS_VARIABLES, DOMAINS, FIELDS, KEY_VARIABLE
from providers.isolation import MICROVM
from providers.remote.base import RemoteProvider
from providers.remote.receiver import Receiver, check_trust
from providers.remote.secret import Secret
from providers.remote.service import AccountClient
from providers.remote.templates import read_templates


class E2BProvider(RemoteProvider):
    id = "e2b"
    name = "E2B"
    description = "Firecracker microVMs in E2B's cloud, or in any service that speaks its protocol."
    icon = "cloud"
    tags = ("saas", "microVM", "global")
    isolation = MICROVM
    capabilities = frozenset(
        {ARGUMENTS, ARTIFACTS, COMMANDS, ENVIRONMENT, FILES, KEPT}
        | {PROCESSES, STREAMING, WATCHING, WORKSPACE}
    )
    config_fields = FIELDS
    languages = ("python", "javascript", "typescript", "bash", "r", "java", "go")
    aliases: ClassVar[Mapping[str, str]] = {"nodejs": "javascript", "shell": "bash"}
    runtime = "firecracker"
    packages = "e2b-code-interpreter"
    awaits_at_top = True

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        if not (config["api_key"] or os.environ.get(KEY_VARIABLE)):
            return False, "api_key: This field is required."
        if config["region"] not in DOMAINS and not (config["domain"] or config["api_url"]):
            return False, (
                f"domain: E2B publishes no host for the region {config['region']!r}. Enter the "
                "domain E2B gave you for it, or choose the region us."
            )
        for name in ("api_url", "sandbox_url"):
            if config[name] and not config[name].startswith(("https://", "http://")):
                return False, f"{name}: Must begin with https:// or http://."
        read_templates(config["templates"])
        check_trust(config, given_addresses(self.config_fields, config).values())
        return True, None

    def connect(self, config: Mapping[str, Any]) -> AccountClient:
        from providers.e2b.client import Account

        return Account(
            Secret(config["api_key"] or os.environ[KEY_VARIABLE]),
            config["domain"] or DOMAINS.get(config["region"], ""),
            config["api_url"] or "",
            config["sandbox_url"] or "",
            Receiver.of(config, (os.environ.get(name, "") for name in ADDRESS_VARIABLES)),
            region=config["region"],
            template=config["template"] or "",
            internet=config["internet_access"],
        )

"""Runs code in Alibaba Cloud's Code Interpreter sandboxes, through the official agentrun-sdk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from providers.addresses import given_addresses
from providers.aliyun_codeinterpreter.schema import (
    DEFAULT_REGION,
    FIELDS,
    REGIONS,
    REQUIRED,
    chosen,
    from_environment,
)
from providers.base import ARGUMENTS, COMMANDS, FILES, KEPT, WORKSPACE
from providers.isolation import MICROVM
from providers.remote.base import RemoteProvider
from providers.remote.receiver import Receiver, check_trust
from providers.remote.secret import Secret
from providers.remote.service import AccountClient
from providers.remote.templates import read_templates


class AliyunCodeInterpreterProvider(RemoteProvider):
    id = "aliyun_codeinterpreter"
    name = "Aliyun Code Interpreter"
    description = "Serverless microVMs of Alibaba Cloud, at most 30 s a run."
    icon = "cloud"
    tags = ("saas", "microVM", "China")
    isolation = MICROVM
    capabilities = frozenset({ARGUMENTS, COMMANDS, FILES, KEPT, WORKSPACE})
    config_fields = FIELDS
    languages = ("python", "javascript")
    runtime = "microvm"
    packages = "agentrun-sdk==0.0.54"

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        for name in REQUIRED:
            if not chosen(config, name):
                return False, f"{name}: This field is required."
        if (region := chosen(config, "region")) and region not in REGIONS:
            return False, f"region: Must be one of: {', '.join(REGIONS)}."
        if not chosen(config, "account_id").isdecimal():
            return False, "account_id: Must be the primary account's id, which has digits only."
        read_templates(config["templates"])
        check_trust(config, given_addresses(self.config_fields, config).values())
        return True, None

    def connect(self, config: Mapping[str, Any]) -> AccountClient:
        from providers.aliyun_codeinterpreter.client import Account

        return Account(
            Secret(chosen(config, "access_key_id")),
            Secret(chosen(config, "access_key_secret")),
            chosen(config, "account_id"),
            chosen(config, "region") or DEFAULT_REGION,
            chosen(config, "data_endpoint"),
            chosen(config, "control_endpoint"),
            Receiver.of(config, map(from_environment, ("data_endpoint", "control_endpoint"))),
            template=config["template_name"] or "",
        )

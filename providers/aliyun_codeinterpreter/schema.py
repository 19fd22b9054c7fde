"""The Aliyun provider's configuration, and the environment variables that stand in for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from providers.remote import receiver, templates
from providers.schema import ConfigField

REGIONS = ("cn-hangzhou", "cn-beijing", "cn-shanghai", "cn-shenzhen", "cn-guangzhou")
MAX_SECONDS = 30

# Which variables the SDK itself reads, in its order.
ENVIRONMENT = {
    "access_key_id": ("AGENTRUN_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_ID"),
    "access_key_secret": ("AGENTRUN_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_ACCESS_KEY_SECRET"),
    "account_id": ("AGENTRUN_ACCOUNT_ID", "FC_ACCOUNT_ID"),
    "region": ("AGENTRUN_REGION", "FC_REGION"),
    "data_endpoint": ("AGENTRUN_DATA_ENDPOINT",),
    "control_endpoint": ("AGENTRUN_CONTROL_ENDPOINT",),
}
REQUIRED = ("access_key_id", "access_key_secret", "account_id")
DEFAULT_REGION = REGIONS[0]


def from_environment(name: str) -> str:
    """The value that the environment has for a field, empty where there is none."""
    return next((found for key in ENVIRONMENT[name] if (found := os.environ.get(key))), "")


def chosen(config: Mapping[str, Any], name: str) -> str:
    """A field's value: the configuration's own, or else the environment's."""
    return config.get(name) or from_environment(name)


def _is_required(name: str) -> bool:
    return not from_environment(name)


def _first_region() -> str | None:
    """What the form begins with. None where the environment names another one than it offers."""
    found = from_environment("region") or DEFAULT_REGION
    return found if found in REGIONS else None


FIELDS = {
    "access_key_id": ConfigField(
        "string",
        "Access Key ID",
        required=_is_required("access_key_id"),
        secret=True,
        placeholder="LTAI5t...",
        environment=ENVIRONMENT["access_key_id"],
        description="Use a RAM user, not the primary account. Empty: AGENTRUN_ACCESS_KEY_ID.",
    ),
    "access_key_secret": ConfigField(
        "string",
        "Access Key Secret",
        required=_is_required("access_key_secret"),
        secret=True,
        environment=ENVIRONMENT["access_key_secret"],
        description="Empty: AGENTRUN_ACCESS_KEY_SECRET.",
    ),
    "account_id": ConfigField(
        "string",
        "Account ID",
        required=_is_required("account_id"),
        address=False,
        placeholder="1234567890123456",
        description="Id of the primary account. Empty: AGENTRUN_ACCOUNT_ID.",
    ),
    "region": ConfigField(
        "string",
        "Region",
        default=_first_region(),
        options=REGIONS,
        description=f"Empty: AGENTRUN_REGION, or {DEFAULT_REGION}.",
    ),
    "template_name": ConfigField(
        "string",
        "Template Name",
        address=False,
        description="Name of a Code Interpreter template. Empty: cofferdam, created if missing.",
    ),
    "templates": templates.FIELD,
    "timeout": ConfigField(
        "integer",
        "Execution Timeout (seconds)",
        default=MAX_SECONDS,
        min=1,
        max=MAX_SECONDS,
        description="Default and maximum for requests. The limit of the service is 30.",
    ),
    "data_endpoint": ConfigField(
        "string",
        "Data endpoint",
        address=True,
        environment=ENVIRONMENT["data_endpoint"],
        placeholder="https://ACCOUNT.agentrun-data.REGION.aliyuncs.com",
        description="Empty: AGENTRUN_DATA_ENDPOINT, or from account and region.",
        group="Connection",
    ),
    "control_endpoint": ConfigField(
        "string",
        "Control endpoint",
        address=True,
        environment=ENVIRONMENT["control_endpoint"],
        placeholder="https://agentrun.REGION.aliyuncs.com",
        description="Empty: AGENTRUN_CONTROL_ENDPOINT, or from the region.",
        group="Connection",
    ),
    **receiver.FIELDS,
}

"""The E2B provider's configuration."""

from __future__ import annotations

import os

from providers.remote import receiver, templates
from providers.schema import ConfigField

# The regions whose host is public. E2B's default domain serves the US; for another region E2B
# tells its customer the domain, and nothing here guesses it.
DOMAINS = {"us": "e2b.app"}

KEY_VARIABLE = "E2B_API_KEY"
ADDRESS_VARIABLES = ("E2B_API_URL", "E2B_SANDBOX_URL")

FIELDS = {
    "api_key": ConfigField(
        "string",
        "API Key",
        required=not os.environ.get(KEY_VARIABLE),
        secret=True,
        placeholder="e2b_...",
        environment=(KEY_VARIABLE,),
        description=f"Empty: the environment variable {KEY_VARIABLE}.",
    ),
    "region": ConfigField(
        "string",
        "Region",
        default="us",
        options=("us", "eu"),
        description="us uses e2b.app. For eu, enter the domain from E2B.",
    ),
    "timeout": ConfigField(
        "integer",
        "Execution Timeout (seconds)",
        default=30,
        min=5,
        max=300,
        description="Default and maximum for requests. The sandbox lives one minute longer.",
    ),
    "internet_access": ConfigField(
        "boolean",
        "Internet access",
        default=False,
        description="Allow code to access the internet, for example to install packages.",
    ),
    "template": ConfigField(
        "string",
        "Template",
        address=False,
        placeholder="code-interpreter-v1",
        description="Name or id of a sandbox template with the code interpreter.",
    ),
    "templates": templates.FIELD,
    "domain": ConfigField(
        "string",
        "Domain",
        address=True,
        placeholder="e2b.app",
        description="Domain of another region or a self-hosted E2B. Empty: from the region.",
        group="Connection",
    ),
    "api_url": ConfigField(
        "string",
        "API address",
        address=True,
        environment=ADDRESS_VARIABLES[:1],
        placeholder="https://api.e2b.app",
        description="Overrides the domain. Empty: E2B_API_URL, or from the domain.",
        group="Connection",
    ),
    "sandbox_url": ConfigField(
        "string",
        "Sandbox address",
        address=True,
        environment=ADDRESS_VARIABLES[1:],
        description="One address for all sandboxes of a self-hosted E2B. "
        "Empty: E2B_SANDBOX_URL, or from the domain.",
        group="Connection",
    ),
    **receiver.FIELDS,
}

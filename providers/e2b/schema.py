"""The E2B provider's configuration."""

from __future__ import annotations

import os

from providers.remote import receiver
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
        description=f"Empty: {KEY_VARIABLE} of the environment.",
    ),
    "region": ConfigField(
        "string",
        "Region",
        default="us",
        options=("us", "eu"),
        description="us is served by e2b.app. For eu enter the domain that E2B gave you.",
    ),
    "timeout": ConfigField(
        "integer",
        "Execution Timeout (seconds)",
        default=30,
        min=5,
        max=300,
        description="Runs that name no time have this one, those that ask for more are refused. "
        "A sandbox lives a minute longer.",
    ),
    "internet_access": ConfigField(
        "boolean",
        "Internet access",
        default=False,
        description="Whether code may reach the internet, to install packages for example.",
    ),
    "template": ConfigField(
        "string",
        "Template",
        address=False,
        placeholder="code-interpreter-v1",
        description="Name or id of a sandbox template with the code interpreter in it.",
    ),
    "domain": ConfigField(
        "string",
        "Domain",
        address=True,
        placeholder="e2b.app",
        description="Of another region or a self-hosted E2B. Empty: by region.",
    ),
    "api_url": ConfigField(
        "string",
        "API address",
        address=True,
        environment=ADDRESS_VARIABLES[:1],
        placeholder="https://api.e2b.app",
        description="Instead of the domain's. Empty: E2B_API_URL of the environment, or by domain.",
    ),
    "sandbox_url": ConfigField(
        "string",
        "Sandbox address",
        address=True,
        environment=ADDRESS_VARIABLES[1:],
        description="One address for all sandboxes, as a self-hosted E2B may have. "
        "Empty: E2B_SANDBOX_URL of the environment, or by domain.",
    ),
    **receiver.FIELDS,
}

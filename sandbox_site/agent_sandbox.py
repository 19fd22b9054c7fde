"""The variables of Agent Sandbox: each is obeyed with its own default.

What is about its storage (`S3_*`, `PRESIGN_EXPIRES_SECONDS`) is `sandbox_site.storage_settings`'.
Those that have no effect here are refused, see `sandbox_site.settings_table.REFUSED`.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.core.exceptions import ImproperlyConfigured

from sandbox_site.environment import StrictEnv

# What is guessed in a minute is no key.
LEAST_KEY_LENGTH = 16
_PUBLISHED = ("change-me", "your-secret-api-key")


@dataclass(frozen=True)
class AgentSandbox:
    """What its calls below /v1 do, where they differ from ours. Seconds and bytes."""

    api_key: str
    total_seconds: int
    idle_seconds: int
    execution_seconds: int
    upload_bytes: int
    output_bytes: int

    def __repr__(self) -> str:
        return "AgentSandbox(...)"


def read(env: StrictEnv) -> AgentSandbox:
    """Raises ImproperlyConfigured for what is not understood."""
    return AgentSandbox(
        api_key=_api_key(env),
        total_seconds=env.number("SANDBOX_TTL_SECONDS"),
        idle_seconds=env.number("SANDBOX_IDLE_SECONDS"),
        execution_seconds=env.number("SANDBOX_EXEC_TIMEOUT_SECONDS"),
        upload_bytes=env.number("MAX_UPLOAD_BYTES"),
        output_bytes=env.number("MAX_OUTPUT_BYTES"),
    )


def _api_key(env: StrictEnv) -> str:
    key = env.secret("SANDBOX_API_KEY")
    if not key:
        return ""
    if (
        key in _PUBLISHED
        or len(key) < LEAST_KEY_LENGTH
        or not key.isascii()
        or not key.isprintable()
    ):
        raise ImproperlyConfigured(
            f"SANDBOX_API_KEY: {LEAST_KEY_LENGTH} or more printable ASCII characters that are not "
            "published, for example from `openssl rand -hex 32`"
        )
    return key

"""The variables of Agent Sandbox: each is obeyed with its own default, or refused with the reason.

What is about its storage (`S3_*`, `PRESIGN_EXPIRES_SECONDS`) is `sandbox_site.storage_settings`'.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.core.exceptions import ImproperlyConfigured

from sandbox_site.environment import StrictEnv

MOST_SECONDS = 31_536_000
# What is guessed in a minute is no key.
LEAST_KEY_LENGTH = 16
_PUBLISHED = ("change-me", "your-secret-api-key")

_REFUSED = {
    "SANDBOX_IMAGE": "the pool runs images that `manage.py build_images` has prepared. Name your "
    "image in SANDBOX_BASE_PYTHON_IMAGE",
    "WORK_ROOT": "no folder of this host is mounted into a sandbox. Files are stored in DATA_DIR "
    "or at STORAGE_URL",
}


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
    """Raises ImproperlyConfigured for what is not understood, and for what is refused."""
    for name, reason in _REFUSED.items():
        if env.str(name, default=""):
            raise ImproperlyConfigured(f"{name} has no effect: {reason}. Remove it")
    return AgentSandbox(
        api_key=_api_key(env),
        total_seconds=env.bounded("SANDBOX_TTL_SECONDS", default=1800, low=1, high=MOST_SECONDS),
        idle_seconds=env.bounded("SANDBOX_IDLE_SECONDS", default=600, low=1, high=MOST_SECONDS),
        execution_seconds=env.bounded(
            "SANDBOX_EXEC_TIMEOUT_SECONDS", default=10, low=1, high=86_400
        ),
        upload_bytes=env.bounded("MAX_UPLOAD_BYTES", default=50 * 2**20, low=1, high=64 * 2**30),
        output_bytes=env.bounded("MAX_OUTPUT_BYTES", default=200_000, low=1, high=64 * 2**20),
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

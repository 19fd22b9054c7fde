"""System checks: what must hold before the process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags

from providers.errors import ProviderUnavailable

# Asks the database. Commands that mend what it finds leave it out.
INSTALLATION = "installation"
# What must hold before a command does anything. The other checks are of the code, which is loaded
# whole for them and has not changed since it was tested.
BEFORE_WORK = (Tags.security, Tags.files, INSTALLATION)

# What AES-256 is worth is what its key is worth: 32 characters of token_urlsafe hold 192 bits.
_SHORTEST = 32

_HINT = (
    "Set FERNET_KEYS to a list of long random keys, the newest first, and keep them: "
    "values that were encrypted with a lost key cannot be read again."
)


def check_fernet_keys(**kwargs: Any) -> list[CheckMessage]:
    """Without keys of its own the encrypted field would quietly use SECRET_KEY.

    Changing SECRET_KEY, which is done freely, would then destroy every stored credential.
    """
    keys = getattr(settings, "FERNET_KEYS", None)
    if not keys:
        return [Error("FERNET_KEYS is not set.", hint=_HINT, id="providers.E001")]
    if isinstance(keys, str | bytes):
        return [Error("FERNET_KEYS must be a list of keys.", hint=_HINT, id="providers.E002")]
    if not all(isinstance(key, str | bytes) and key.strip() for key in keys):
        return [Error("FERNET_KEYS contains an empty key.", hint=_HINT, id="providers.E003")]
    if any(len(key) < _SHORTEST for key in keys):
        return [
            checks.Warning(
                f"FERNET_KEYS contains a key of less than {_SHORTEST} characters.",
                hint="Put a new key first (python -c 'import secrets; "
                "print(secrets.token_urlsafe(32))'), run `manage.py rotate_keys`, then remove the "
                "old key.",
                id="providers.W001",
            )
        ]
    return []


def check_local_python(**kwargs: Any) -> list[CheckMessage]:
    """SANDBOX_LOCAL_PYTHON is an interpreter that sandboxes can see.

    The one that `manage.py packages` makes is made anew where it is broken.
    """
    chosen = settings.SANDBOX_LOCAL_PYTHON
    if chosen in ("", str(Path(settings.PACKAGES_DIR) / "bin" / "python")):
        return []
    from providers.runtime.launchers.guest_files import find_python

    try:
        find_python(chosen)
    except ProviderUnavailable as error:
        return [
            Error(
                error.message,
                hint="Sandboxes need this interpreter: without it no Python program starts.",
                id="providers.E004",
            )
        ]
    return []

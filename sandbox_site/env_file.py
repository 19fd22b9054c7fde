"""The file `.env` in the project's folder: settings for whoever has no better place for them."""

from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path

import environ
from environ.compat import ImproperlyConfigured

from sandbox_site.environment import FILE
from sandbox_site.settings_table import SETTINGS

_ASSIGNMENT = re.compile(r"(?:export )?([A-Za-z_][A-Za-z_0-9]*)=")
# Of a variable that is not a setting.
_SECRET = re.compile(r"SECRET|KEYS?(_ID)?$|TOKEN|PASSWORD|_URL$")


def read_env_file(path: Path) -> frozenset[str]:
    """Put what the file sets into the environment, which wins where it sets the same.

    Returns the names that came from the file. A variable that is set to nothing counts as unset,
    and one whose content is in a file (`..._FILE`) as set. Raises ImproperlyConfigured for a line
    that is no assignment, and for a file with secrets that others may read.
    """
    try:
        with path.open(encoding="utf-8-sig") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read()
    except FileNotFoundError:
        return frozenset()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ImproperlyConfigured(f"Cannot read {path}: {reason}") from None
    _check_lines(path, text)
    values = _parsed(text)
    secrets = sorted(filter(_is_secret, values))
    if secrets and stat.S_ISREG(mode) and mode & 0o027:
        raise ImproperlyConfigured(
            f"{path} holds {', '.join(secrets)}, and others may read or write it: chmod 600 {path}"
        )
    given = {name for name, value in os.environ.items() if value}
    added = set()
    for name, value in values.items():
        twin = name.removesuffix(FILE) if name.endswith(FILE) else name + FILE
        if not given & {name, twin}:
            os.environ[name] = value
            added.add(name)
    return frozenset(added)


def _check_lines(path: Path, text: str) -> None:
    """django-environ passes over what it does not understand, and logs it, secret or not."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#") and not _ASSIGNMENT.match(line):
            raise ImproperlyConfigured(
                f"{path}, line {number}: not of the form NAME=value, nor a comment (# first)"
            )


def _parsed(text: str) -> dict[str, str]:
    class Parser(environ.Env):  # type: ignore[misc]
        ENVIRON: dict[str, str] = {}

    Parser.read_env(io.StringIO(text))
    return Parser.ENVIRON


def _is_secret(name: str) -> bool:
    if setting := SETTINGS.get(name):
        return setting.is_secret
    return _SECRET.search(name) is not None and not name.endswith(FILE)

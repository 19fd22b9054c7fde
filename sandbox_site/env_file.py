"""The file `.env` in the project's folder: settings for whoever has no better place for them."""

from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path

import environ
from django.core.exceptions import ImproperlyConfigured

_ASSIGNMENT = re.compile(r"(?:export )?([A-Za-z_][A-Za-z_0-9]*)=")
_SECRET = re.compile(r"SECRET|KEYS|TOKEN|PASSWORD|_URL$")
_FILE = "_FILE"


def read_env_file(path: Path) -> None:
    """Put what the file sets into the environment, which wins where it sets the same.

    A variable that is set to nothing counts as unset, and one whose content is in a file
    (`..._FILE`) as set. Raises ImproperlyConfigured for a line that is no assignment, and for a
    file with secrets that others may read.
    """
    try:
        with path.open(encoding="utf-8-sig") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read()
    except FileNotFoundError:
        return
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
    for name, value in values.items():
        twin = name.removesuffix(_FILE) if name.endswith(_FILE) else name + _FILE
        if not given & {name, twin}:
            os.environ[name] = value


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
    return _SECRET.search(name) is not None and not name.endswith(_FILE)

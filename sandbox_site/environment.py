"""Reading settings from the environment, strictly: a value that is not understood is an error."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import environ
from django.core.exceptions import ImproperlyConfigured

# Of a path that is not absolute: each process may stand somewhere else.
PROJECT = Path(__file__).resolve().parent.parent

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")

_BOOLEANS = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


class StrictEnv(environ.Env):  # type: ignore[misc]
    """django-environ that guesses nothing.

    The base class reads `DEBUG=ture` as false. Here whatever is not understood raises
    ImproperlyConfigured naming the variable. An empty variable counts as unset, because that is
    what compose files and CI systems make of a value they do not have.
    """

    def get_value(
        self,
        var: str,
        cast: Any = None,
        default: Any = environ.Env.NOTSET,
        parse_default: bool = False,
    ) -> Any:
        if not self.ENVIRON.get(var) and default is not self.NOTSET:
            return default
        try:
            return super().get_value(var, cast, default, parse_default)
        except ValueError as error:
            raise ImproperlyConfigured(f"{var}: {error}") from None

    @classmethod
    def parse_value(cls, value: str, cast: Any) -> Any:
        if cast is bool:
            return parse_boolean(value)
        return super().parse_value(value, cast)

    def tristate(self, var: str) -> bool | None:
        """True, False, or None when the variable is unset."""
        value = self.ENVIRON.get(var)
        return self.bool(var) if value else None

    def bounded(self, var: str, default: int, low: int, high: int) -> int:
        """A whole number from `low` to `high`. Raises ImproperlyConfigured for any other."""
        value: int = self.int(var, default=default)
        if not low <= value <= high:
            raise ImproperlyConfigured(f"{var}: {value} is not between {low} and {high}")
        return value

    def choice(
        self, var: str, default: str, choices: tuple[str, ...], *, any_case: bool = False
    ) -> str:
        """One of `choices`."""
        given: str = self.str(var, default=default)
        value = given.lower() if any_case else given
        if value not in choices:
            known = ", ".join(repr(choice) for choice in choices)
            raise ImproperlyConfigured(f"{var}: {given!r} is not one of {known}")
        return value

    def networks(self, var: str, *, names: bool = True) -> list[str]:
        """Networks, addresses and, with `names`, names of hosts, as `Allowed.parse` reads them."""
        from providers.addresses import Allowed

        entries: list[str] = self.list(var, default=[])
        for entry in entries:
            try:
                allowed = Allowed.parse(entry)
                if not names and (allowed.network is None or allowed.port):
                    raise ValueError(f"{entry!r} is not a network")
            except ValueError as error:
                raise ImproperlyConfigured(f"{var}: {error}") from None
        return entries

    def host(self, var: str) -> str:
        """A host, with a port if another than the usual one is meant, or ""."""
        value: str = self.str(var, default="")
        if value and not _HOST.fullmatch(value):
            raise ImproperlyConfigured(f"{var}: {value!r} is not a host or host:port")
        return value

    def secret(self, var: str) -> str:
        """The value of `var`, or the content of the file that `{var}_FILE` names, or "".

        Read from the environment itself: the base class would take a secret that starts with
        "$" for the name of another variable.
        """
        value = os.environ.get(var, "")
        path = os.environ.get(f"{var}_FILE", "")
        if value and path:
            raise ImproperlyConfigured(f"Set {var} or {var}_FILE, not both")
        if not path:
            return value
        try:
            value = (PROJECT / path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ImproperlyConfigured(f"{var}_FILE: cannot read {path}: {reason}") from None
        if not value:
            raise ImproperlyConfigured(f"{var}_FILE: {path} is empty")
        return value


def parse_boolean(value: str) -> bool:
    """True or False. Raises ValueError for anything that is not plainly one of them."""
    try:
        return _BOOLEANS[value.strip().lower()]
    except KeyError:
        raise ValueError(f"{value!r} is not one of {', '.join(_BOOLEANS)}") from None

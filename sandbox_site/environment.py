"""Reading settings from the environment, strictly: a value that is not understood is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import environ
from environ.compat import ImproperlyConfigured

from sandbox_site.settings_table import FOREIGN, PREFIXES, REFUSED, SETTINGS, Setting

# Of a path that is not absolute: each process may stand somewhere else.
PROJECT = Path(__file__).resolve().parent.parent

# After the name of a secret: the path of a file with it.
FILE = "_FILE"

_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?"

_BOOLEANS = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


# A Kubernetes service of that name puts these into every container.
_OF_KUBERNETES = r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$"


class StrictEnv(environ.Env):  # type: ignore[misc]
    """django-environ that guesses nothing, and reads what `settings_table` declares.

    The base class reads `DEBUG=ture` as false. Here whatever is not understood raises
    ImproperlyConfigured naming the variable. An empty variable counts as unset, because that is
    what compose files and CI systems make of a value they do not have. A name that is not declared
    raises KeyError.

    `values` and `defaults` hold what was read so far, by name; `in_file` the names that the file
    `.env` has set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.in_file: frozenset[str] = frozenset()

    def get_value(
        self,
        var: str,
        cast: Any = None,
        default: Any = environ.Env.NOTSET,
        parse_default: bool = False,
    ) -> Any:
        """The value of a variable; `default` is for one that depends on other settings."""
        setting = declaration(var)
        if default is self.NOTSET:
            default = list(setting.default) if cast is list else setting.default
        value = default
        if self.is_set(var):
            if self.ENVIRON[var].startswith("$"):
                # django-environ would read the variable of that name instead.
                raise ImproperlyConfigured(
                    f"{var}: begins with $. A value cannot name another variable; write the value."
                )
            try:
                value = super().get_value(var, cast, default, parse_default)
            except ValueError as error:
                raise ImproperlyConfigured(f"{var}: {error}. {_remedy(setting)}") from None
        self.values[var], self.defaults[var] = value, default
        return value

    @classmethod
    def parse_value(cls, value: str, cast: Any) -> Any:
        if cast is bool:
            return parse_boolean(value)
        if cast is int:
            return parse_integer(value)
        return super().parse_value(value, cast)

    def is_set(self, var: str) -> bool:
        """Whether the environment or the file `.env` has a value."""
        return bool(self.ENVIRON.get(var))

    def tristate(self, var: str) -> bool | None:
        """True, False, or None when the variable is unset."""
        return cast(bool | None, self.bool(var))

    def number(
        self, var: str, default: int | None = None, low: int | None = None, high: int | None = None
    ) -> int:
        """A whole number from `low` to `high`, which are those of the declaration unless given.

        Raises ImproperlyConfigured for any other.
        """
        setting = declaration(var)
        value: int = self.int(var) if default is None else self.int(var, default=default)
        low = setting.low if low is None else low
        high = setting.high if high is None else high
        if not low <= value <= high:
            raise ImproperlyConfigured(
                f"{var}: {value} is not between {low} and {high}. {_remedy(setting)}"
            )
        return value

    def choice(self, var: str, *, any_case: bool = False) -> str:
        """One of the choices of the declaration."""
        setting = declaration(var)
        given: str = self.str(var)
        value = given.lower() if any_case else given
        if value not in setting.choices:
            known = ", ".join(repr(each) for each in setting.choices)
            raise ImproperlyConfigured(
                f"{var}: {given!r} is not one of {known}. {_remedy(setting)}"
            )
        return value

    def networks(self, var: str) -> list[str]:
        """Networks, addresses and, if declared so, names of hosts, as `Allowed.parse` has them."""
        from providers.addresses import Allowed

        names = declaration(var).kind == "networks"
        entries: list[str] = self.list(var)
        for entry in entries:
            try:
                allowed = Allowed.parse(entry)
                if not names and (allowed.network is None or allowed.port):
                    raise ValueError(f"{entry!r} is not a network")
            except ValueError as error:
                raise ImproperlyConfigured(f"{var}: {error}. {_remedy(declaration(var))}") from None
        return entries

    def host(self, var: str) -> str:
        """A host, with a port if another than the usual one is meant, or ""."""
        value: str = self.str(var)
        if value and not re.fullmatch(_HOST, value):
            raise ImproperlyConfigured(
                f"{var}: {value!r} is not a host or host:port. {_remedy(declaration(var))}"
            )
        return value

    def secret(self, var: str) -> str:
        """The value of `var`, or the content of the file that `{var}_FILE` names, or "".

        It is not kept in `values`.

        Read from the environment itself: the base class would take a secret that starts with
        "$" for the name of another variable.
        """
        if not declaration(var).is_secret:
            raise KeyError(f"{var} is not declared as a secret")
        value = os.environ.get(var, "")
        path = os.environ.get(var + FILE, "")
        if value and path:
            raise ImproperlyConfigured(f"Set {var} or {var}_FILE, not both")
        if not path:
            return value
        try:
            value = (PROJECT / path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ImproperlyConfigured(f"{var}{FILE}: cannot read {path}: {reason}") from None
        if not value:
            raise ImproperlyConfigured(f"{var}{FILE}: {path} is empty")
        return value


def declaration(var: str) -> Setting:
    """The declaration of a variable. Raises KeyError if there is none.

    That of a secret stands for `NAME_FILE` as well.
    """
    if (found := SETTINGS.get(var)) is not None:
        return found
    found = SETTINGS.get(var.removesuffix(FILE)) if var.endswith(FILE) else None
    if found is None or not found.is_secret:
        raise KeyError(f"{var} is not declared in sandbox_site.settings_table")
    return found


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise ImproperlyConfigured for a variable that has no effect although it seems to be a
    setting: one of REFUSED, and one that begins as settings do and is not declared."""
    for name in sorted(names):
        if reason := REFUSED.get(name):
            raise ImproperlyConfigured(f"{name} has no effect: {reason}. Remove it")
        if not name.startswith(PREFIXES) or name in FOREIGN or re.search(_OF_KUBERNETES, name):
            continue
        try:
            declaration(name)
        except KeyError:
            raise ImproperlyConfigured(f"{name} is not a setting. {_similar(name)}") from None


def _similar(name: str) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, [*SETTINGS, *(f"{each}{FILE}" for each in SETTINGS)], n=1)
    meant = f"Write {found[0]} if you mean that, or remove it" if found else "Remove it"
    return f"{meant}. `manage.py settings` lists all of them"


def _remedy(setting: Setting) -> str:
    default = setting.shown.replace("`", "") or text_of(setting.default) or "empty"
    return f"Correct it, or remove it: the default is {default}"


def text_of(value: Any) -> str:
    """A value as one would write it in the environment."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def parse_integer(value: str) -> int:
    """A whole number. Raises ValueError for anything else."""
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None


def parse_boolean(value: str) -> bool:
    """True or False. Raises ValueError for anything that is not plainly one of them."""
    try:
        return _BOOLEANS[value.strip().lower()]
    except KeyError:
        raise ValueError(f"{value!r} is not one of {', '.join(_BOOLEANS)}") from None

"""What a declaration says of a setting. Plain data: every process loads it at its start.

Tuples with names, because they are made in a tenth of the time of frozen dataclasses.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Kind = Literal[
    "text", "number", "flag", "list", "choice", "networks", "addresses", "host", "secret"
]


class Setting(NamedTuple):
    """One environment variable.

    `low` and `high` are the limits of a number, `unit` is its unit. `shown` describes a default
    that depends on the machine or on other settings. `meaning` is Markdown for docs/settings.md.
    """

    name: str
    kind: Kind
    default: Any
    meaning: str
    unit: str = ""
    low: int = 0
    high: int = 0
    choices: tuple[str, ...] = ()
    shown: str = ""
    is_common: bool = False

    @property
    def is_secret(self) -> bool:
        """Whether its value is never shown, and may be in the file that `NAME_FILE` names."""
        return self.kind == "secret"


class Group(NamedTuple):
    """Settings of one subject. `text` is Markdown that comes before their table."""

    title: str
    settings: tuple[Setting, ...]
    text: str = ""


def text(
    name: str, meaning: str, default: str = "", *, shown: str = "", is_common: bool = False
) -> Setting:
    return Setting(name, "text", default, meaning, shown=shown, is_common=is_common)


def number(
    name: str,
    default: int,
    low: int,
    high: int,
    meaning: str,
    *,
    unit: str = "",
    shown: str = "",
    is_common: bool = False,
) -> Setting:
    return Setting(
        name, "number", default, meaning, unit, low, high, shown=shown, is_common=is_common
    )


def flag(
    name: str, meaning: str, default: bool | None = False, *, is_common: bool = False
) -> Setting:
    """A default of None tells "unset" from false."""
    return Setting(name, "flag", default, meaning, is_common=is_common)


def several(
    name: str,
    meaning: str,
    default: tuple[str, ...] = (),
    *,
    shown: str = "",
    is_common: bool = False,
) -> Setting:
    """Entries that commas separate."""
    return Setting(name, "list", default, meaning, shown=shown, is_common=is_common)


def choice(
    name: str, default: str, choices: tuple[str, ...], meaning: str, *, is_common: bool = False
) -> Setting:
    return Setting(name, "choice", default, meaning, choices=choices, is_common=is_common)


def networks(name: str, meaning: str, *, is_common: bool = False) -> Setting:
    """Networks, addresses and names of hosts, with or without a port."""
    return Setting(name, "networks", (), meaning, is_common=is_common)


def addresses(name: str, meaning: str, *, shown: str = "") -> Setting:
    """Networks and addresses alone."""
    return Setting(name, "addresses", (), meaning, shown=shown)


def host(name: str, meaning: str) -> Setting:
    return Setting(name, "host", "", meaning)


def secret(name: str, meaning: str, *, shown: str = "", is_common: bool = False) -> Setting:
    return Setting(name, "secret", "", meaning, shown=shown, is_common=is_common)

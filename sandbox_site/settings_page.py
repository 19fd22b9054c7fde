"""The settings as people read them: docs/settings.md, and the list of `manage.py settings`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sandbox_site.environment import FILE, StrictEnv, text_of
from sandbox_site.settings_table import FOREIGN, GROUPS, REFUSED, SETTINGS, Setting

_INTRODUCTION = """\
# Settings

All settings are environment variables. A value that is not valid is an error at start, never a
guess. So is a variable whose name begins as those of Cofferdam do and is not on this page. An empty
variable counts as unset. A secret may be in a file: then `NAME_FILE` holds the file's path. A flag
is `true`, `yes`, `on` or `1`, or `false`, `no`, `off` or `0`. A relative path starts from the
project's folder, wherever a command is run.

The variables of the file `.env` in the project's folder (`NAME=value`, one per line; `#` begins a
comment) are put into the environment. If the environment sets the same variable, the environment
wins. A line in another form is refused. So is a file with secrets that others may read or write
(`chmod 600 .env`; its group may read it).

`manage.py settings` lists all settings with their values and where these come from; `--changed`
only those that differ from the default. Where code runs is configured in the admin, not here.

This page is made from `sandbox_site/settings_table`; `manage.py settings --markdown` prints it.
"""

_COMMON = """\
## Common settings

These are the settings that an installation usually sets. All others are below, by group.
"""

_EXAMPLE = """\
A production environment, for which `manage.py check --deploy` reports no issues:

```
DEBUG=false
SECRET_KEY_FILE=/run/secrets/secret_key
FERNET_KEYS_FILE=/run/secrets/fernet_keys
LEDGER_KEYS_FILE=/run/secrets/ledger_keys
DATABASE_URL=postgres://cofferdam:password@db.internal:5432/cofferdam
Q_BROKER=redis
REDIS_URL=redis://:password@redis.internal:6379/0
DATA_DIR=/var/lib/cofferdam
ALLOWED_HOSTS=cofferdam.example.com
CSRF_TRUSTED_ORIGINS=https://cofferdam.example.com
HTTPS_ONLY=true
TRUSTED_PROXIES=10.0.0.0/24
```

[upgrading.md](upgrading.md) says how one version follows another, and
[deployment/two-hosts.md](deployment/two-hosts.md#several-instances-of-one-installation) which
settings must be the same on every host.
"""


def page() -> str:
    """The text of docs/settings.md."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield _INTRODUCTION
    yield _COMMON
    yield _table(setting for setting in SETTINGS.values() if setting.is_common)
    yield _EXAMPLE
    for group in GROUPS:
        yield f"## {group.title}\n"
        if group.text:
            yield f"{group.text}\n"
        yield _table(setting for setting in group.settings if not setting.is_common)
    yield "## Variables without effect\n"
    yield "Each of these is refused at start, because it would do nothing:\n"
    yield "".join(f"- `{name}`: {reason}.\n" for name, reason in REFUSED.items())
    yield (
        "These variables of RAGFlow may be in the same environment, and are not read:\n"
        f"{', '.join(f'`{name}`' for name in sorted(FOREIGN))}.\n"
    )


def _table(settings: Iterable[Setting]) -> str:
    lines = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for setting in settings:
        name = f"`{setting.name}`" + (f" (`{FILE}`)" if setting.is_secret else "")
        default = setting.shown or _default(setting)
        lines.append(f"| {name} | {default} | {_allowed(setting)} | {setting.meaning} |")
    return "\n".join(lines) + "\n"


def _default(setting: Setting) -> str:
    if setting.default is None:
        return "unset"
    text = text_of(setting.default)
    return f"`{text}` {setting.unit}".rstrip() if text else "empty"


def _allowed(setting: Setting) -> str:
    if setting.kind == "number":
        return f"{setting.low} to {setting.high}"
    return ", ".join(f"`{choice}`" for choice in setting.choices if choice)


@dataclass(frozen=True)
class Row:
    """A setting as it is in force. The value of a secret is not in it."""

    name: str
    value: str
    source: str
    is_changed: bool


def rows(env: StrictEnv) -> list[Row]:
    """List every setting with its value, and whether it comes from the environment, from the file
    `.env` or from the default. `env` has read the settings."""
    return [_row(env, setting) for setting in SETTINGS.values()]


def _row(env: StrictEnv, setting: Setting) -> Row:
    names = (setting.name, setting.name + FILE) if setting.is_secret else (setting.name,)
    given = [name for name in names if os.environ.get(name)]
    source = "default"
    if given:
        source = ".env file" if env.in_file.intersection(given) else "environment"
    if setting.is_secret:
        value = "set" if given else setting.shown.replace("`", "") or "not set"
        return Row(setting.name, value, source, bool(given))
    default = env.defaults.get(setting.name, setting.default)
    if given and setting.name not in env.values:
        # Nothing has checked it, such as the address of a collector that is switched off: it may
        # hold a password.
        return Row(setting.name, "set, not active", source, True)
    found = env.values.get(setting.name, default)
    return Row(setting.name, text_of(found), source, bool(given) and found != default)

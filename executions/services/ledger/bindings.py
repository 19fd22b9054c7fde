"""Which rows, beside executions, the ledger binds, and what of the pages it does not.

Each change of a bound row is an entry with one hash over its columns, whose names the entry gives
itself: a column that is added later is bound from then on, and no older entry is wrong for it. To
bind the rows of another model, add a line to BINDINGS; what stays out has its reason in NOT_PROVEN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from django.apps import apps
from django.db.models import Model

from executions.services.ledger.canonical import canonical, text_hash
from executions.services.ledger.sealing import sealable
from providers.errors import InvalidConfiguration
from providers.fields import DecryptionError, EncryptedTextField
from providers.services.history import config_of

_PERMISSION = ("content_type__app_label", "content_type__model", "codename")


@dataclass(frozen=True)
class Binding:
    """How the rows of one model are bound.

    `kind` is the kind of its entries and `subject` the column that they are called by. `related`
    are many-to-many relations, each with what names the rows at its other end. `shown` are columns
    that the entry also says in clear; None says all of them, which then must hold no secret and
    nothing of a person. `check` looks at what no hash of columns can say.
    """

    kind: str
    subject: str = "pk"
    related: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shown: tuple[str, ...] | None = None
    only_if_changed: bool = False
    check: Callable[[Any], str] = lambda row: ""


def _config_is_its_versions(row: Any) -> str:
    """Its own hash would let a short secret be guessed; the one of its version is salted."""
    versions = apps.get_model("providers", "ConfigVersion")._default_manager.defer("content")
    version = versions.filter(subject=row.provider_id, version=row.version).first()
    if version is None:
        # Saved past the services. That a version was removed is found at the version.
        return ""
    try:
        return "" if config_of(version) == row.config else "its configuration is not its version's"
    except (DecryptionError, InvalidConfiguration) as error:
        return f"its configuration cannot be compared: {error}"


BINDINGS: Mapping[str, Binding] = {
    "executions.tenant": Binding("tenant", "slug"),
    "executions.apikey": Binding(
        "api_key", "prefix", shown=("name", "scope", "expires_at", "revoked_at")
    ),
    "executions.budget": Binding("setting"),
    "providers.route": Binding("setting"),
    "providers.routestep": Binding("setting"),
    "providers.providerprice": Binding("setting"),
    "providers.providerconfig": Binding(
        "setting", "provider_id", shown=("is_active", "version"), check=_config_is_its_versions
    ),
    "providers.configversion": Binding("setting", "subject", shown=("version",)),
    "providers.pendingchange": Binding("setting", shown=("author", "status", "decided_by")),
    "providers.accounthold": Binding("setting"),
    "auth.user": Binding(
        "user",
        "username",
        related={"groups": ("name",), "user_permissions": _PERMISSION},
        shown=("is_active", "is_staff", "is_superuser"),
    ),
    "auth.group": Binding("role", "name", related={"permissions": _PERMISSION}, shown=()),
    "admin.logentry": Binding("admin_action", "object_id", shown=()),
    # Every code that is entered changes its row, mostly in what is not bound.
    "otp_totp.totpdevice": Binding(
        "authenticator", shown=("user_id", "confirmed"), only_if_changed=True
    ),
    "sandbox_site.recoverycode": Binding("authenticator", shown=("device_id", "used_at")),
}

_OPEN = "Of an open execution nothing is bound; it is null when it has ended."
_COUNTED = "Counted from executions, whose records are bound: `recount_executions` does it anew."
_NOW = "The state of the moment, written every few seconds."

# What pages show and the ledger does not bind: by model, by column ("*" is all), with the reason.
NOT_PROVEN: Mapping[str, Mapping[str, str]] = {
    "executions.execution": {"pending": _OPEN},
    "executions.artifact": {"id": "A number for links; what it leads to is bound."},
    "executions.apikey": {"last_used_at": "Written while the key is used."},
    "auth.user": {"last_login": "Written at every login."},
    "providers.pendingchange": {
        "config": "What waits, encrypted; `diff`, which is bound, is what its approver sees of it."
    },
    "otp_totp.totpdevice": dict.fromkeys(
        (
            *("last_t", "drift", "last_used_at"),
            *("throttling_failure_timestamp", "throttling_failure_count"),
        ),
        "Written whenever a code is entered.",
    ),
    "executions.spending": {
        "*": "Added up from executions, whose costs are bound; what budgets are compared with."
    },
    "executions.spendingalert": {"*": "Told when it was seen; nothing follows from it."},
    "executions.executioncount": {"*": _COUNTED},
    "executions.executiontenantcount": {"*": _COUNTED},
    "executions.executionlatency": {"*": _COUNTED},
    "executions.savedfilter": {"*": "A way to look at the list, made by whoever looks."},
    "executions.codetext": {"*": "A copy of code for searching it; what is found is bound."},
    "executions.codesearchprogress": {"*": "How far the copy for searching got."},
    "providers.circuitbreaker": {"*": _NOW + " Opening or closing one by hand is an entry."},
    "providers.providerhealth": {"*": _NOW},
    "axes.accessattempt": {"*": "Failed logins, deleted after a successful one."},
}


def columns_of(model: type[Model]) -> list[str]:
    """What an entry of a row of this model binds now."""
    label = model._meta.label_lower
    left_out = NOT_PROVEN.get(label, {}).keys() | _proved_otherwise(label)
    columns = [
        column.attname for column in model._meta.concrete_fields if column.attname not in left_out
    ]
    return [*columns, *BINDINGS[label].related]


def row_hash(row: Model, columns: Sequence[str]) -> str:
    """One hash over these columns. Raises DecryptionError, and AttributeError for unknown ones."""
    return text_hash(canonical({name: _value(row, name) for name in columns}))


def model_of(label: str) -> type[Model] | None:
    """The model of a label that an entry names; None when it is gone."""
    try:
        return apps.get_model(label)
    except LookupError:
        return None


def _proved_otherwise(label: str) -> set[str]:
    return {"config"} if BINDINGS[label].check is _config_is_its_versions else set()


def _value(row: Model, name: str) -> Any:
    related = BINDINGS[row._meta.label_lower].related.get(name)
    if related is not None:
        names = getattr(row, name).order_by().values_list(*related)
        return sorted(".".join(parts) for parts in names)
    value = getattr(row, name)
    if name in encrypted_columns(type(row)) and value is not None:
        # A version's content holds its own salt; the text itself must not be guessable here.
        return text_hash(canonical(sealable(value)))
    return sealable(value)


@cache
def encrypted_columns(model: type[Model]) -> frozenset[str]:
    """The columns that only holders of FERNET_KEYS can read."""
    return frozenset(
        column.attname
        for column in model._meta.concrete_fields
        if isinstance(column, EncryptedTextField)
    )

"""Which rows, beside executions, the ledger binds, and their comparison with its last entries."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db.models import Model

from executions.ledger.checkpoints import Problem
from executions.ledger.entry import canonical, public_key_id, text_hash, to_canonical
from executions.ledger.models import LedgerEntry
from providers.errors import InvalidConfiguration
from providers.fields import DecryptionError, EncryptedTextField
from providers.services.history import config_of

_PERMISSION = ("content_type__app_label", "content_type__model", "codename")


@dataclass(frozen=True)
class Binding:
    """How the rows of one model are bound.

    `kind` is the kind of its entries and `subject` what they are called by: a column, "pk" for
    model and key, or a text that is made of the row. `related`
    are many-to-many relations, each with what names the rows at its other end. `shown` are columns
    that the entry also says in clear; None says all of them, which then must hold no secret and
    nothing of a person. `check` looks at what no hash of columns can say, for a verification;
    `compare` at that of it which no clock decides, before a change, and raises where it cannot.
    """

    kind: str
    subject: str | Callable[[Any], str] = "pk"
    related: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shown: tuple[str, ...] | None = None
    only_if_changed: bool = False
    check: Callable[[Any], str] = lambda row: ""
    compare: Callable[[Any], str] = lambda row: ""


def _config_is_its_versions(row: Any) -> str:
    try:
        return _compare_config(row)
    except DecryptionError as error:
        return f"its configuration cannot be compared: {error}"


def _compare_config(row: Any) -> str:
    """Its own hash would let a short secret be guessed; the one of its version is salted. Both were
    written with the same key: one that is lost makes neither readable."""
    versions = apps.get_model("providers", "ConfigVersion")._default_manager.defer("content")
    version = versions.filter(subject=row.provider_id, version=row.version).first()
    if version is None:
        # Saved past the services. That a version was removed is found at the version.
        return ""
    config = row.config
    try:
        return "" if config_of(version) == config else "its configuration is not its version's"
    except InvalidConfiguration as error:
        return f"its configuration cannot be compared: {error}"


def _is_its_tenants(row: Any) -> str:
    """The relation becomes null with the tenant; what it may not become is another's."""
    # That a tenant was removed behind our back is found at its own row.
    tenant = apps.get_model("executions", "Tenant")._default_manager.filter(pk=row.tenant_id)
    slug = tenant.values_list("slug", flat=True).first()
    return f"it was moved to the tenant {slug}" if slug not in (None, row.tenant_slug) else ""


def subject_of_user(user_id: int) -> str:
    """What the authenticators of a user are called by, so that those that are gone are found."""
    return f"user {user_id}"


BINDINGS: dict[str, Binding] = {
    "executions.tenant": Binding("tenant", "slug"),
    "executions.apikey": Binding(
        "api_key",
        "prefix",
        shown=(
            *("name", "scopes", "languages", "providers", "templates", "addresses"),
            *("minimum_isolation", "rotated_from", "expires_at", "revoked_at"),
        ),
    ),
    "executions.lateresult": Binding(
        "late_result", "execution_id", shown=("status", "exit_code", "error_code", "finished_at")
    ),
    "executions.session": Binding(
        "session",
        shown=("tenant_slug", "state", "provider", "config_version", "closed_because"),
        check=_is_its_tenants,
        compare=_is_its_tenants,
    ),
    "executions.snapshot": Binding(
        "snapshot",
        shown=("tenant_slug", "api_key_prefix", "source", "files"),
        check=_is_its_tenants,
        compare=_is_its_tenants,
    ),
    # The secret itself is 256 random bits, which its hash does not give away.
    "executions.webhooksecret": Binding(
        "webhook_secret", shown=("tenant_id", "created_at", "retired_at")
    ),
    "executions.schedule": Binding(
        "schedule",
        shown=("tenant_id", "api_key_prefix", "cron", "timezone", "paused_because"),
    ),
    "executions.legalhold": Binding("legal_hold", shown=("tenant_slug",)),
    "executions.budget": Binding("setting"),
    "executions.policy": Binding("policy", shown=("tenant_slug", "draft", "analysis")),
    # The value is sealed with a salt, so that its hash does not let a short one be guessed.
    "executions.networkcredential": Binding(
        "network_credential",
        "name",
        shown=("tenant_slug", "placement", "version", "revoked_at"),
    ),
    "executions.networklist": Binding("network_list", shown=("tenant_slug", "draft", "mode")),
    "executions.template": Binding(
        "template", "name", shown=("tenant_id", "created_by", "removed_at")
    ),
    "executions.templateversion": Binding(
        "template_version",
        shown=("number", "digest", "size_bytes", "python", "requested_by", "approved_by"),
    ),
    "providers.route": Binding("setting"),
    "providers.routestep": Binding("setting"),
    "providers.providerprice": Binding("setting"),
    "providers.providerconfig": Binding(
        "setting",
        "provider_id",
        shown=("is_active", "version"),
        check=_config_is_its_versions,
        compare=_compare_config,
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
        "authenticator",
        lambda device: subject_of_user(device.user_id),
        shown=("user_id", "confirmed"),
        only_if_changed=True,
    ),
    "sandbox_site.recoverycode": Binding("authenticator", shown=("device_id", "used_at")),
}


def add_check(label: str, check: Callable[[Any], str]) -> None:
    """Have a verification of the rows of this model also call `check`. See `Binding`."""
    BINDINGS[label] = replace(BINDINGS[label], check=check)


_OPEN = "Open executions are not in the ledger yet. Null after the end."
_NOW = "Current state, updated every few seconds."

_SAVED = "File names and times as sandboxes report them. The content is hashed."

# What pages show and the ledger does not bind: by model, by column ("*" is all), with the reason.
NOT_PROVEN: Mapping[str, Mapping[str, str]] = {
    "executions.execution": {"pending": _OPEN, "process_id": _OPEN},
    "executions.process": {"*": _NOW},
    "executions.session": {
        **dict.fromkeys(
            ("tenant_id", "api_key_id"), "Null after deletion; slug and prefix are covered."
        ),
        **dict.fromkeys(("env", "ref"), "Secret, and shown on no page."),
        **dict.fromkeys(
            (
                *("contexts", "turns", "used_at", "touched", "unsaved_since", "wakes"),
                *("waking_since", "woken_turn", "process_id", "attachment"),
            ),
            _NOW,
        ),
        "released_at": "Written when the sandbox is gone; the end of the session is covered.",
    },
    "executions.schedule": {
        "api_key_id": "Null after deletion; the prefix is covered.",
        "next_at": "Updated for each run, and checked against the schedule, which is covered.",
        **dict.fromkeys(("last_at", "last_problem"), "Updated for each run."),
    },
    "executions.snapshot": {
        "tenant_id": "Null after deletion; the slug is covered.",
        "workspace_id": "Null after the tenant and its files are deleted.",
    },
    "executions.templateversion": {
        "state": "Progress. A version is ready exactly when it has a digest, which is covered.",
        **dict.fromkeys(("log", "problem", "execution_id"), "Progress of the build."),
        **dict.fromkeys(("claimed_until", "claims", "tries", "ended_at"), _NOW),
    },
    "executions.packageadvisory": {"*": "Copy of a file. Each load has its own entry."},
    "executions.templatedraft": {"*": "Temporary; the version that comes of it is covered."},
    "executions.templateupload": {"*": "Temporary; the declaration of the version has its files."},
    "executions.workspace": {"*": _SAVED},
    "executions.workspacefile": {"*": _SAVED},
    "executions.blob": {"*": _SAVED},
    "executions.loosefile": {"*": _SAVED},
    "executions.storedtotal": {"*": _SAVED},
    "executions.executionevent": {"*": "Temporary; the record has the same data permanently."},
    "executions.runsignal": {"*": "Temporary; each cancellation has its own entry."},
    "executions.approval": {"*": "Each decision has its own entry, and is part of the record."},
    "executions.toolcall": {
        "*": "Calls, approvals and results have their own entries, with hashes."
    },
    "executions.networkattempt": {
        "*": "For the search. The record of each run, which is covered, has its own attempts."
    },
    "executions.artifact": {"id": "Number used in links; the artifact itself is covered."},
    "executions.keyrefusal": {"*": "Time of the last rejection; each rejection has its own entry."},
    "executions.requestwindow": {"*": "Requests in the current minute; shown on no page."},
    "executions.apikey": {"last_used_at": "Updated while the key is used."},
    "auth.user": {"last_login": "Updated at every sign-in."},
    "providers.pendingchange": {
        "config": (
            "The encrypted change. Its diff, which the approver sees, is covered, and only that "
            "is applied."
        )
    },
    "otp_totp.totpdevice": dict.fromkeys(
        (
            *("last_t", "drift", "last_used_at"),
            *("throttling_failure_timestamp", "throttling_failure_count"),
        ),
        "Updated whenever a code is entered.",
    ),
    "executions.spending": {"*": "Totals of executions. The cost of each execution is covered."},
    "executions.webhookdelivery": {
        "*": "Delivery status is not covered by the ledger; payloads are."
    },
    "executions.spendingalert": {"*": "A notification only; it changes nothing."},
    "executions.statistic": {
        "*": "Counted from ledger-backed records. `recount_executions` counts the hours again."
    },
    "executions.alert": {
        "*": "Current state. Opening, acknowledging and resolving have their own entries."
    },
    "executions.alertdelivery": {"*": "Delivery status; it changes nothing."},
    "executions.ledgercheck": {"*": "Result of the verification. Each request has its own entry."},
    "executions.auditexport": {
        "*": "Export progress. The ledger itself proves the exported entries."
    },
    "executions.report": {
        "*": "Progress of the report. Its files are signed, and their hashes are in the ledger."
    },
    "executions.savedfilter": {"*": "Personal list filters."},
    "executions.codetext": {"*": "Copy of code for the search. The record is covered."},
    "executions.codesearchprogress": {"*": "Progress of the search index."},
    "providers.circuitbreaker": {"*": _NOW + " Manual changes have their own entries."},
    "providers.providerhealth": {"*": _NOW},
    "providers.providercheckcount": {"*": "Counted from background health checks."},
    "sandbox_site.installationmark": {
        "*": "Compared at each start; an instance with other values does not start."
    },
    "axes.accessattempt": {"*": "Failed sign-ins, deleted after a successful one."},
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
        return text_hash(canonical(to_canonical(value)))
    return to_canonical(value)


@cache
def encrypted_columns(model: type[Model]) -> frozenset[str]:
    """The columns that only holders of FERNET_KEYS can read."""
    return frozenset(
        column.attname
        for column in model._meta.concrete_fields
        if isinstance(column, EncryptedTextField)
    )


BASELINE = "baseline"
DELETED = "deleted"
FOUND = "found"
# What a row is entered as that somebody changed past the service, and what somebody with the
# server's shell says of it later.
ALTERED = "altered outside"
ACCEPTED = "accepted"
# What an entry says of the row before, where it has no hash of it: nothing was ever entered of it;
# no key vouches for its last entry; it could not be compared.
NEVER_ENTERED = "never entered"
NOT_VOUCHED_FOR = "not vouched for"
NOT_COMPARED = "not compared"
_AT_ONCE = 200


def has_baseline() -> bool:
    """Whether rows were ever taken into this ledger as a whole, so that each must have an entry."""
    return LedgerEntry.objects.filter(kind=BASELINE).exists()


class RowsRead:
    """What the entries read so far say of each row, in a temporary file: rows may be many."""

    def __init__(self) -> None:
        self.compared = 0
        # Rows that were never entered, of models that were never taken into the ledger as a whole.
        self.unproven = 0
        self.adopted: dict[str, list[str]] = {}
        # "" is a file that SQLite keeps to itself and removes.
        self._said = sqlite3.connect("")
        self._said.execute(
            "CREATE TABLE said (model TEXT, row TEXT, sequence INTEGER, columns TEXT, hash TEXT,"
            " former TEXT, altered INTEGER, key_id TEXT, PRIMARY KEY (model, row)) WITHOUT ROWID"
        )

    def __enter__(self) -> RowsRead:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.close()

    def read(self, stated: Mapping[str, Any]) -> str:
        """Take in what an authentic entry says of a row. What it tells of an alteration, which no
        later entry makes good; "" where it tells of none."""
        if stated["kind"] == BASELINE:
            self.adopted.update(stated["models"])
        if "row_hash" not in stated:
            return ""
        place = (stated["model"], stated["row"])
        said = self._said.execute(
            "SELECT sequence, hash, former, key_id FROM said WHERE model = ? AND row = ?", place
        ).fetchone()
        problem = self._alteration(stated, said)
        if stated["action"] == DELETED or stated["row_hash"] is None:
            self._said.execute("DELETE FROM said WHERE model = ? AND row = ?", place)
            return problem
        # Taking stock enters a row that is as it was, and whoever changes it at that moment may
        # have compared it with the entry before.
        former = said[1] if said is not None and stated["action"] == FOUND else None
        is_altered = stated["action"] == ALTERED
        self._said.execute(
            "INSERT OR REPLACE INTO said VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(*place, stated["sequence"], json.dumps(stated["columns"]), stated["row_hash"]),
                *(former, stated["sequence"] if is_altered else stated.get("altered_at")),
                stated["key_id"],
            ),
        )
        return problem

    def _alteration(self, stated: Mapping[str, Any], said: tuple[int, str, str, str] | None) -> str:
        row = f"{stated['model']} {stated['row']}"
        if stated["action"] == ALTERED:
            return f"{row} was changed outside the service: {stated['because']}"
        before = stated["before"]
        if before == NOT_COMPARED:
            return ""
        if before == NEVER_ENTERED:
            is_right = said is None and stated["model"] not in self.adopted
        elif before == NOT_VOUCHED_FOR:
            # Somebody may have put its key into the settings since.
            named = {public_key_id(key) for key in settings.LEDGER_TRUSTED_KEYS}
            is_right = said is None or said[3] in named
        elif before is None:
            is_right = said is None
        else:
            is_right = said is not None and before in said[1:3]
        if is_right:
            return ""
        last = "no entry says it was" if said is None else f"entry {said[0]} left it"
        return f"{row} was changed outside the service: it was not as {last}"

    def keep(self) -> None:
        self._said.commit()

    def fingerprint(self) -> str:
        """One hash over what was said of every row so far. Call it before `look`, which forgets."""
        said = hashlib.sha256(canonical(self.adopted).encode())
        for row in self._said.execute("SELECT * FROM said ORDER BY model, row"):
            said.update(f"\n{json.dumps(row)}".encode())
        return f"sha256:{said.hexdigest()}"

    def look(self) -> bool:
        """Compare every bound row; whether any is not as it was entered, as far as was read."""
        for label in BINDINGS:
            if (model := model_of(label)) is not None:
                self._look_at_model(label, model)
        return bool(self._said.execute("SELECT EXISTS (SELECT 1 FROM said)").fetchone()[0])

    def problems(self, end: int) -> Iterator[Problem]:
        """What is still not as it was entered, of what `look` left: rows changed or removed, and
        at `end` rows added. Call it while nothing can be entered, with all entries read.
        """
        for label, row, sequence in self._said.execute("SELECT model, row, sequence FROM said"):
            model = model_of(label) if label in BINDINGS else None
            if model is None:
                continue
            found = model._base_manager.filter(pk=row).defer(*encrypted_columns(model)).first()
            if found is not None:
                detail = self._difference(label, found)
                if detail and sequence:
                    yield "altered record", sequence, f"{label} {row} {detail}"
                elif detail:
                    yield "missing", end, f"{label} {row} {detail}"
            elif sequence:
                yield "missing record", sequence, f"{label} {row} was removed"

    def _look_at_model(self, label: str, model: type[Model]) -> None:
        """Forget the rows that are as they should be, and note those that nothing was said of."""
        after: Any = None
        while True:
            # A lost key must not end the reading: what is encrypted is read row by row.
            rows = model._base_manager.order_by("pk").defer(*encrypted_columns(model))
            chunk = list((rows if after is None else rows.filter(pk__gt=after))[:_AT_ONCE])
            if not chunk:
                return
            for row in chunk:
                self.compared += 1
                place = (label, str(row.pk))
                if not self._difference(label, row):
                    self._said.execute("DELETE FROM said WHERE model = ? AND row = ?", place)
                elif self.last_entry_of(*place) is None:
                    self._said.execute(
                        "INSERT INTO said VALUES (?, ?, 0, '', '', NULL, NULL, NULL)", place
                    )
            after = chunk[-1].pk

    def last_entry_of(self, label: str, row: str) -> tuple[int, list[str], str] | None:
        """Return the entry that spoke of a row last, the columns it binds, and their hash."""
        said = self._said.execute(
            "SELECT sequence, columns, hash FROM said WHERE model = ? AND row = ?", (label, row)
        ).fetchone()
        return None if said is None or not said[0] else (said[0], json.loads(said[1]), said[2])

    def altered_at(self, label: str, row: str) -> int | None:
        """The entry that tells of an alteration of the row which nobody has accepted since."""
        found = self._said.execute(
            "SELECT altered FROM said WHERE model = ? AND row = ?", (label, row)
        ).fetchone()
        return found[0] if found else None

    def _difference(self, label: str, row: Model) -> str:
        """How a row differs from what was said of it last; "" when it does not."""
        said = self.last_entry_of(label, str(row.pk))
        if said is None and label not in self.adopted:
            self.unproven += 1
            return ""
        if said is None:
            return "has no entry: it was added outside the service"
        _, columns, expected = said
        try:
            if row_hash(row, columns) != expected:
                return "was changed"
        except (DecryptionError, AttributeError, ValueError) as error:
            return f"cannot be compared: {error}"
        return BINDINGS[label].check(row)

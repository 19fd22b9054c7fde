"""Whoever can write to the database, or to the checkpoints, without the ledger's key."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.contrib.contenttypes.models import ContentType
from django.db import IntegrityError, connection, models, transaction
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.models import Artifact, Budget, Execution, LedgerEntry, Tenant
from executions.services.keys import create_api_key, revoke
from executions.services.ledger import LedgerUnavailable, append, checkpoints
from executions.services.ledger.adoption import take_stock
from executions.services.ledger.bindings import BINDINGS, NOT_PROVEN, columns_of, model_of
from executions.services.ledger.canonical import digest
from executions.services.ledger.formats import signed_bytes, write
from executions.services.ledger.keyring import SigningKey, _load
from executions.services.ledger.verification import verify
from executions.services.replay import replay
from providers.fields import EncryptedTextField
from providers.models import PendingChange, ProviderPrice, Route
from providers.services.approval import reject, request_change
from providers.services.configuration import activate, save_config
from tests.conftest import Caller
from tests.processes import ROOT
from tests.running import run

TABLE = LedgerEntry._meta.db_table
RUN = (
    "answer = ExecutionResult('out', 'err', 0, 0.5, {'cpu_seconds': 0.25}, has_result=True,"
    " result=[1], outputs=[{'text/plain': 'x'}],"
    " artifacts=[ArtifactFile('a.txt', 'text/plain', b'content'),"
    " ArtifactFile('b.txt', 'text/plain', b'other')])"
)


def sql(statement: str, *values: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


@pytest.fixture
def everything(scripted: object, alice: Caller, charlie: Caller, settings: Any) -> None:
    """A row of every kind that the ledger binds, made as the service makes them."""
    settings.TWO_PERSON_RULE = False
    take_stock()
    ProviderPrice.objects.create(provider_id="scripted", per_second=Decimal("0.0001"))
    row = save_config("local", {"pool_size": 2}, author="dora", reason="to begin")
    save_config("local", {"pool_size": 3}, author="dora", reason="more room")
    activate("local", author="dora")
    activate("scripted", author="dora")
    route = Route.objects.create(owner="elsewhere", strategy="cheapest")
    route.steps.create(provider=row, weight=3)
    Budget.objects.create(tenant_slug="wonderland", limit=5)
    user = get_user_model().objects.create_user("dora", "dora@example.org", "a long pass phrase")
    user.groups.add(Group.objects.create(name="Inspector"))
    user.user_permissions.add(Permission.objects.order_by("pk")[0])
    Group.objects.get(name="Inspector").permissions.add(Permission.objects.order_by("pk")[1])
    TOTPDevice.objects.create(user=user, name="phone", confirmed=True)
    two = Tenant.objects.filter(slug__in=("wonderland", "elsewhere"))
    LogEntry.objects.log_actions(user.pk, two, 2, "changed both")
    gone, _ = create_api_key(alice.tenant, "second")
    revoke(gone)
    settings.TWO_PERSON_RULE = True
    for size in (4, 5):
        change = request_change(
            "local", PendingChange.Action.SAVE, {"pool_size": size}, author="dora", reason="more"
        )
    assert isinstance(change, PendingChange)
    reject(change, decided_by="erin")
    answer = run(alice, RUN, arguments={"a": 1}, idempotency_key="once").json()
    assert answer.get("status") == "succeeded", answer
    assert replay(Execution.objects.get(pk=answer["id"])).error is None
    assert run(charlie, "pass").status_code == 200
    assert [str(finding) for finding in verify().findings] == []
    assert verify().unproven == 0


@contextmanager
def undone() -> Iterator[None]:
    """What is done within it is rolled back."""
    with transaction.atomic():
        if connection.vendor == "sqlite":
            # Nobody who can write to the file is held by its constraints.
            sql("PRAGMA ignore_check_constraints = ON")
        yield
        transaction.set_rollback(True)
    if connection.vendor == "sqlite":
        sql("PRAGMA ignore_check_constraints = OFF")


def other(column: Any, value: Any) -> Any:
    """Something else that this column could hold, as the database takes it."""
    if isinstance(column, EncryptedTextField):
        return column.get_db_prep_save({"config": {"pool_size": 9}, "salt": "0"}, connection)
    if isinstance(column, models.JSONField):
        return '{"forged": 1}'
    if column.choices:
        return next(key for key, _ in column.choices if key != value)
    if isinstance(column, models.ForeignKey):
        target = column.related_model._base_manager.exclude(pk=value).values_list("pk", flat=True)
        found = target.first()
        if found is None and not column.null:
            return int(value) + 777
        return found.hex if isinstance(found, UUID) and connection.vendor == "sqlite" else found
    if isinstance(column, models.UUIDField):
        return uuid4().hex if connection.vendor == "sqlite" else uuid4()
    if isinstance(column, models.BooleanField):
        return not value
    if isinstance(column, models.DateTimeField):
        moved = (value or Execution.objects.all()[0].created_at) + timedelta(days=1)
        return connection.ops.adapt_datetimefield_value(moved)
    if isinstance(column, models.DecimalField):
        return str((value or Decimal(0)) + 1)
    if isinstance(column, (models.IntegerField, models.AutoField, models.FloatField)):
        return (value or 0) + 777
    text = str(value or "")
    return text[:-1] + "x" if column.max_length and len(text) >= column.max_length else text + "x"


def is_found(model: type[models.Model], column: Any, row: models.Model) -> bool | None:
    """Whether a changed column shows; None where another row has that value, and only one may."""
    value = None if isinstance(column, EncryptedTextField) else getattr(row, column.attname)
    pk = row.pk.hex if isinstance(row.pk, UUID) and connection.vendor == "sqlite" else row.pk
    update = f'UPDATE {model._meta.db_table} SET "{column.column}" = %s'
    with undone():
        try:
            with transaction.atomic():
                sql(f'{update} WHERE "{model._meta.pk.column}" = %s', other(column, value), pk)
        except IntegrityError:
            return None
        return not verify().is_intact


@pytest.mark.django_db
def test_every_bound_column_of_every_model_shows_when_it_is_changed(everything: None) -> None:
    """Generated from the models: a new column is bound, or it has its reason in NOT_PROVEN."""
    bound = [model_of(label) for label in BINDINGS]
    missed, tried = [], 0
    for model in (*bound, Execution, Artifact, LedgerEntry):
        assert model is not None
        unproven = NOT_PROVEN.get(model._meta.label_lower, {})
        rows = list(model._base_manager.order_by("pk"))
        assert rows, f"the test makes no row of {model._meta.label}"
        if model in (LedgerEntry, Execution):
            # The replay, which has a value in every column.
            replayed = Execution.objects.get(replay_of__isnull=False).pk
            rows = [row for row in rows if replayed in (row.pk, getattr(row, "execution_id", None))]
        for column in model._meta.concrete_fields:
            if column.attname in unproven:
                continue
            shown = is_found(model, column, rows[-1])
            if shown is None:
                shown = is_found(model, column, rows[0])
            tried += 1
            if not shown:
                missed.append(f"{model._meta.label}.{column.attname}")
    assert missed == []
    assert tried > 140


@pytest.mark.django_db
def test_every_row_that_is_removed_or_added_shows(everything: None) -> None:
    for label in BINDINGS:
        model = model_of(label)
        assert model is not None
        row = model._base_manager.order_by("pk").first()
        assert row is not None
        with undone():
            model._base_manager.filter(pk=row.pk)._raw_delete("default")
            assert any("was removed" in finding.detail for finding in verify().findings), label
        with undone():
            twin = copy.copy(row)
            for column in model._meta.concrete_fields:
                if column.unique or isinstance(column, models.CharField):
                    value = (
                        other(column, getattr(row, column.attname)) if not column.choices else None
                    )
                    if value is not None:
                        setattr(twin, column.attname, value)
            if hasattr(twin, "version"):
                twin.version += 100
            if hasattr(twin, "is_active") and label == "providers.providerconfig":
                twin.is_active = False
            if hasattr(twin, "provider_id") and label == "providers.routestep":
                continue
            twin.pk = None
            model._base_manager.bulk_create([twin])
            assert any("behind our back" in finding.detail for finding in verify().findings), label


@pytest.mark.django_db
def test_who_is_in_a_role_and_what_it_may_shows(everything: None) -> None:
    user, group = get_user_model().objects.get(), Group.objects.get(name="Inspector")
    member, may = type(user).groups.through, Group.permissions.through
    permission = Permission.objects.order_by("pk")[5]
    held = Permission.objects.order_by("pk")[1]
    administrators = Group.objects.exclude(pk=group.pk).order_by("name")[0]
    attacks: list[Callable[[], Any]] = [
        lambda: member._default_manager.bulk_create(
            [member(user_id=user.pk, group_id=administrators.pk)]
        ),
        lambda: member._default_manager.filter(user_id=user.pk)._raw_delete("default"),
        lambda: may._default_manager.bulk_create(
            [may(group_id=group.pk, permission_id=permission.pk)]
        ),
        # The permission that somebody holds becomes another one.
        lambda: Permission.objects.filter(pk=held.pk).update(codename="forged"),
        lambda: ContentType.objects.filter(pk=held.content_type_id).update(model="forged"),
        lambda: Group.objects.filter(pk=group.pk).update(name="Administrator2"),
    ]
    for attack in attacks:
        with undone():
            attack()
            assert not verify().is_intact


@pytest.mark.django_db
def test_a_role_that_is_deleted_honestly_leaves_the_ledger_intact(everything: None) -> None:
    Group.objects.get(name="Inspector").delete()
    assert [str(finding) for finding in verify().findings] == []
    Permission.objects.order_by("pk")[0].delete()
    get_user_model().objects.all().delete()
    Route.objects.all().delete()
    Tenant.objects.filter(slug="elsewhere").delete()
    assert [str(finding) for finding in verify().findings] == []


def test_every_model_on_a_page_is_bound_or_named_as_not_proven() -> None:
    decided = {*BINDINGS, *NOT_PROVEN, "executions.artifact", "executions.ledgerentry"}
    ours = {
        model._meta.label_lower
        for app in ("executions", "providers")
        for model in apps.get_app_config(app).get_models()
    }
    shown = {model._meta.label_lower for model in admin.site._registry}
    assert ours | shown <= decided
    for label, columns in NOT_PROVEN.items():
        model = model_of(label)
        assert model is not None, label
        names = {column.attname for column in model._meta.concrete_fields}
        assert set(columns) <= names | {"*"}
        assert not set(columns) & set(columns_of(model) if label in BINDINGS else ())


def test_the_docs_name_what_is_not_proven_and_why() -> None:
    text = " ".join((ROOT / "docs" / "ledger.md").read_text().split())
    for label, columns in NOT_PROVEN.items():
        for column, reason in columns.items():
            named = f"`{label}`" if column == "*" else f"`{label}.{column}`"
            assert named in text, named
            assert reason in text, reason


@pytest.mark.django_db
def test_an_execution_moved_to_another_tenant_or_key_shows(
    everything: None, alice: Caller, charlie: Caller
) -> None:
    ours = Execution.objects.filter(tenant=alice.tenant)
    for values in (
        {"tenant": charlie.tenant},
        {"tenant": None},
        {"api_key": charlie.api_key},
        {"api_key": None},
        {"tenant": charlie.tenant, "tenant_slug": "elsewhere"},
    ):
        with undone():
            ours.update(**values)
            assert not verify().is_intact, values


@pytest.mark.django_db
def test_replaced_bytes_of_an_artifact_show(everything: None) -> None:
    artifact = Artifact.objects.all()[0]
    path = Path(artifact.file.path)
    honest = path.read_bytes()
    try:
        path.write_bytes(b"forgery")
        (finding,) = verify().findings
        assert "were replaced" in finding.detail
        assert verify(artifact_bytes=False).is_intact
        path.unlink()
        assert "cannot be read" in verify().findings[0].detail
    finally:
        path.write_bytes(honest)
    with undone():
        Artifact.objects.filter(pk=artifact.pk).update(file="../../secrets.env")
        assert "outside the data directory" in verify().findings[0].detail


@pytest.mark.django_db
@pytest.mark.parametrize("years", [0, 20])
def test_a_made_up_run_shows_whenever_it_claims_to_have_been(everything: None, years: int) -> None:
    made_up = Execution.objects.filter(status="succeeded")[0]
    made_up.pk = uuid4()
    made_up.idempotency_key = None
    for name in ("created_at", "started_at", "finished_at"):
        setattr(made_up, name, getattr(made_up, name) - timedelta(days=365 * years))
    Execution.objects.bulk_create([made_up])
    (finding,) = verify().findings
    assert (finding.kind, str(made_up.pk) in finding.detail) == ("missing", True)
    # Starting anew does not launder it.
    take_stock()
    assert not verify().is_intact


@pytest.mark.django_db
def test_a_forged_erasure_covers_nothing(everything: None, alice: Caller) -> None:
    """A row that says that everything was erased, signed by nobody we know."""
    forger = _load(1, secrets.token_urlsafe(32))
    head = LedgerEntry.objects.latest("sequence")
    _forge(
        forger,
        head,
        "erasure",
        "wonderland",
        {"data": "output", "created_before": "2999-01-01T00:00:00.000000+00:00"},
    )
    Execution.objects.filter(tenant=alice.tenant).update(stdout="")
    details = [finding.detail for finding in verify().findings]
    assert any("the stdout was removed" in detail for detail in details), details


def _forge(
    key: SigningKey,
    after: LedgerEntry,
    kind: str,
    subject: str,
    content: dict[str, Any],
    **claims: Any,
) -> LedgerEntry:
    """An entry written by hand, behind `after`, signed with this key."""
    stated = {
        **content,
        "ledger": 2,
        "sequence": after.sequence + 1,
        "previous": after.digest,
        "key_id": key.key_id,
        "kind": kind,
        "subject": subject,
        "at": "2026-01-01T00:00:00.000000+00:00",
    }
    statement = write(stated)
    return LedgerEntry.objects.create(
        sequence=after.sequence + 1,
        kind=kind,
        at="2026-01-01T00:00:00Z",
        statement=statement,
        digest=digest(statement),
        key_id=claims.get("key_id", key.key_id),
        signature=key.sign(signed_bytes(stated, statement)),
    )


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("claims_ours", [False, True])
def test_nothing_is_entered_on_a_head_that_our_key_did_not_sign(
    everything: None, alice: Caller, claims_ours: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole attack: a key introduced by itself, entries of its own, and our id on the head."""
    forger = _load(1, secrets.token_urlsafe(32))
    honest = LedgerEntry.objects.latest("sequence")
    introduced = _forge(
        forger,
        honest,
        "ledger_key",
        forger.key_id,
        {"algorithm": "Ed25519", "public_key": forger.public_key},
    )
    claims = {"key_id": honest.key_id} if claims_ours else {}
    forged = _forge(forger, introduced, "note", "forged", {}, **claims)

    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})
    answer = run(alice, RUN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "SB009")
    assert "ledger" in answer.json()["error"]["message"].lower()
    assert LedgerEntry.objects.latest("sequence").sequence == forged.sequence
    if claims_ours:
        assert "ALERT: the ledger's newest entry" in caplog.text
        # From then on nothing is run that could not be entered.
        before = Execution.objects.count()
        assert run(alice, RUN).status_code == 503
        assert Execution.objects.count() == before
    found = verify()
    assert (found.findings[0].kind, found.findings[0].sequence) == (
        "untrusted key",
        introduced.sequence,
    )

    LedgerEntry.objects.filter(sequence__gt=honest.sequence).delete()
    assert run(alice, RUN).status_code == 200
    assert [finding for finding in verify().findings if finding.kind == "untrusted key"] == []


@pytest.mark.django_db(transaction=True)
def test_a_ledger_re_signed_from_its_first_entry_is_refused(
    everything: None, settings: Any
) -> None:
    """Every entry signed anew; the last one names our key, which the forger's introduces."""
    forger = _load(1, secrets.token_urlsafe(32))
    ours = LedgerEntry.objects.get(sequence=1)
    previous = "0" * 64
    for entry in LedgerEntry.objects.order_by("sequence"):
        stated = {**entry.stated, "key_id": forger.key_id, "previous": previous}
        if entry.sequence == 1:
            stated |= {"subject": forger.key_id, "public_key": forger.public_key}
        if entry.sequence == 2:
            stated = {
                **{name: stated[name] for name in ("ledger", "sequence", "previous", "at")},
                "key_id": forger.key_id,
                "kind": "ledger_key",
                "subject": ours.stated["subject"],
                "public_key": ours.stated["public_key"],
            }
        statement = write(stated)
        previous = digest(statement)
        LedgerEntry.objects.filter(pk=entry.pk).update(
            statement=statement,
            digest=previous,
            kind=stated["kind"],
            key_id=forger.key_id,
            signature=forger.sign(signed_bytes(stated, statement)),
        )
    newest = LedgerEntry.objects.latest("sequence")
    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})
    LedgerEntry.objects.filter(pk=newest.pk).update(key_id=ours.key_id)
    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})
    assert verify().findings[0].kind == "untrusted key"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("column", ["statement", "digest", "signature", "key_id"])
def test_an_altered_head_is_not_continued(everything: None, column: str) -> None:
    head = LedgerEntry.objects.latest("sequence")
    forged = {
        "statement": head.statement.replace('"at":"20', '"at":"19'),
        "digest": "0" * 64,
        "signature": head.signature[:-4] + "AA==",
        "key_id": "0" * 16,
    }[column]
    LedgerEntry.objects.filter(pk=head.pk).update(**{column: forged})
    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})


@pytest.fixture
def kept(settings: Any, tmp_path: Path) -> Path:
    settings.LEDGER_CHECKPOINTS = str(tmp_path / "ledger")
    return tmp_path / "ledger"


@pytest.fixture
def long_ledger(transactional_db: None, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three hundred entries, with a line of the checkpoints for every hundredth."""
    for module in ("checkpoints", "marks"):
        monkeypatch.setattr(f"executions.services.ledger.{module}.EVERY", 100)
    for number in range(300):
        append("note", str(number), {})
    assert verify().is_intact
    return kept


def test_checkpoints_that_are_gone_are_found(long_ledger: Path) -> None:
    (long_ledger / "checkpoints.jsonl").rename(long_ledger / "away")
    assert {finding.kind for finding in verify().findings} == {"missing checkpoint"}
    (long_ledger / "head.json").unlink()
    assert "there is no head.json" in " ".join(map(str, verify().findings))
    # Work goes on, and writes them anew. That they had been gone stays to be seen.
    append("note", "later", {})
    checkpoints.write_checkpoint()
    assert {finding.kind for finding in verify().findings} == {"missing checkpoint"}


def test_a_line_taken_out_of_the_checkpoints_is_found(long_ledger: Path) -> None:
    history = long_ledger / "checkpoints.jsonl"
    lines = history.read_text().splitlines(keepends=True)
    for left in (lines[1:], [lines[0], *lines[2:]]):
        history.write_text("".join(left))
        assert "altered checkpoint" in {finding.kind for finding in verify().findings}


def test_a_forged_head_hides_no_truncation_and_holds_nothing_up(long_ledger: Path) -> None:
    head = long_ledger / "head.json"
    honest = head.read_text()
    cut = LedgerEntry.objects.get(sequence=250)
    LedgerEntry.objects.filter(sequence__gt=250).delete()
    forged = {"sequence": 250, "digest": cut.digest, "key_id": cut.key_id, "signature": "AAAA"}
    head.write_text(json.dumps(forged).ljust(319) + "\n")
    kinds = {finding.kind for finding in verify().findings}
    assert {"altered checkpoint", "truncated"} <= kinds

    # Far ahead, so that no commit would be noted any more.
    for text in (
        json.dumps({**json.loads(honest), "sequence": 10**9}),
        json.dumps({"sequence": 10**9, "digest": "0" * 64}),
    ):
        head.write_text(text.ljust(319) + "\n")
        entry = append("note", "after", {})
        noted = checkpoints.head()
        assert noted is not None
        assert (noted.sequence, noted.digest) == (entry.sequence, entry.digest)


def test_a_rotated_key_vouches_for_the_one_before_and_for_no_other(
    transactional_db: None, settings: Any
) -> None:
    append("note", "old", {})
    old = settings.LEDGER_KEYS[0]
    new = secrets.token_urlsafe(32)
    settings.LEDGER_KEYS = [new, old]
    append("note", "new", {})
    settings.LEDGER_KEYS = [new]
    assert verify().is_intact
    forger = _load(1, secrets.token_urlsafe(32))
    head = LedgerEntry.objects.latest("sequence")
    _forge(forger, head, "note", "forged", {})
    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})
    assert [finding.kind for finding in verify().findings] == ["untrusted key"]

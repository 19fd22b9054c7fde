"""Every entry of the ledger reaches the collector, in order, whatever happens in between."""

from __future__ import annotations

import json
import re
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from django.db import connections
from django.db.models import Max

from executions.capabilities.observability import audit_export
from executions.capabilities.observability.audit_export import event_of, export_for
from executions.capabilities.observability.destinations import AuditDestination
from executions.capabilities.observability.models import AuditExport
from executions.ledger.append import append
from executions.ledger.entry import is_signed_by, signed_bytes
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import trusted_keys
from executions.runs.models import Execution
from executions.runs.record import close_record
from executions.tasks import export_ledger
from tests.capabilities.collectors import Receiver, Silent, SyslogCollector
from tests.conftest import Caller
from tests.support.certificates import Authority
from tests.support.ended_runs import ended
from tests.support.held import opened
from tests.support.sessions import in_thread, wait_for

pytestmark = [pytest.mark.django_db, pytest.mark.database]

# RFC 5424, as far as we write it.
MESSAGE = re.compile(
    r"<110>1 \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z [!-~]{1,255} cofferdam - [!-~]{1,32} "
    r'\[meta sequenceId="(\d+)"\] (\{.*\})'
)
# What OCSF 1.3.0 demands of the two classes, as far as we write them.
NUMBER = {"type": "integer"}
TEXT = {"type": "string", "minLength": 1}
OCSF = {
    "type": "object",
    "required": [
        *("activity_id", "category_uid", "class_uid", "type_uid", "severity_id", "time"),
        *("metadata", "actor"),
    ],
    "properties": {
        "activity_id": {"enum": [1, 2, 3, 4, 99]},
        "category_uid": {"enum": [3, 6]},
        "class_uid": {"enum": [3004, 6003]},
        "time": NUMBER,
        "severity_id": {"enum": [1, 3]},
        "status_id": {"enum": [1, 2]},
        "metadata": {
            "required": ["product", "version"],
            "properties": {
                "version": {"const": "1.3.0"},
                "sequence": NUMBER,
                "uid": TEXT,
                "product": {"required": ["vendor_name"]},
            },
        },
        "actor": {"properties": {"user": {"required": ["name"], "properties": {"name": TEXT}}}},
        "raw_data": {"type": "string"},
    },
    "oneOf": [
        {"properties": {"class_uid": {"const": 3004}}, "required": ["entity"]},
        {"properties": {"class_uid": {"const": 6003}}, "required": ["api", "src_endpoint"]},
    ],
}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue(tmp_path).path)
    return context


def to(kind: str, port: int, authority: Authority, **more: Any) -> AuditDestination:
    return AuditDestination(kind, "localhost", port, ca=authority.pem, **more)


def entries(number: int) -> None:
    for n in range(number):
        append("note", f"of {n}\r\n<1>1 - - - - - -", {"n": n, "action": "made"})


def newest() -> int:
    return int(LedgerEntry.objects.aggregate(newest=Max("sequence"))["newest"])


def sequences(collector: SyslogCollector) -> list[int]:
    found = []
    for message in collector.messages:
        match = MESSAGE.fullmatch(message.decode("ascii"))
        assert match, message
        event = json.loads(match[2])
        assert event["metadata"]["sequence"] == int(match[1])
        found.append(int(match[1]))
    return found


def again_at_once() -> None:
    AuditExport.objects.update(retry_at=None)


def test_every_entry_comes_once_in_order_and_proves_itself(
    alice: Caller, settings: Any, tls: ssl.SSLContext, authority: Authority, monkeypatch: Any
) -> None:
    monkeypatch.setattr(audit_export, "BATCH", 4)
    for status in (Execution.Status.SUCCEEDED, Execution.Status.FAILED):
        assert close_record(opened(alice), status, {})
    alice.tenant.save()
    entries(9)
    collector = SyslogCollector(tls)
    settings.AUDIT_EXPORT = to("syslog", collector.port, authority)
    # More than a batch, and then nothing new.
    assert sum(export_for(0) for _ in range(8)) == newest()
    assert export_for(0) == 0
    assert sequences(collector) == list(range(1, newest() + 1))
    collector.close()

    keys = trusted_keys()
    kinds = set()
    for message in collector.messages:
        event = json.loads(message[message.index(b"{") :])
        jsonschema.validate(event, OCSF)
        assert event["type_uid"] == event["class_uid"] * 100 + event["activity_id"]
        assert event["category_uid"] == event["class_uid"] // 1000
        stated, unmapped = json.loads(event["raw_data"]), event["unmapped"]
        # Whoever has the public keys can check it without us.
        signed = signed_bytes(stated, event["raw_data"])
        assert is_signed_by(keys[unmapped["key_id"]], signed, unmapped["signature"])
        kinds.add((unmapped["kind"], event["status_id"]))
        if unmapped["kind"] == "execution":
            assert event["actor"]["user"]["name"] == f"key:{alice.api_key.prefix}"
            assert event["metadata"]["tenant_uid"] == "wonderland"
    assert {("execution", 1), ("execution", 2), ("tenant", 1), ("note", 1)} <= kinds
    row = AuditExport.objects.get()
    assert (row.sequence, row.tries, row.claimed_until) == (newest(), 0, None)


def test_a_collector_that_was_away_misses_nothing(
    settings: Any, tls: ssl.SSLContext, authority: Authority
) -> None:
    entries(5)
    before = SyslogCollector(tls)
    settings.AUDIT_EXPORT = to("syslog", before.port, authority)
    export_for(0)
    before.close()
    entries(5)
    assert export_for(0) == 0
    row = AuditExport.objects.get()
    assert (row.tries, row.sequence) == (1, newest() - 5)
    assert "Refused" in row.problem
    # It is left alone for a while, and asked again then.
    entries(1)
    after = SyslogCollector(tls, port=before.port)
    assert export_for(0) == 0
    assert after.connections == 0
    again_at_once()
    assert export_for(0) == 6
    assert sequences(before) + sequences(after) == list(range(1, newest() + 1))
    after.close()


def test_what_was_cut_off_on_the_way_is_sent_again(
    settings: Any, tls: ssl.SSLContext, authority: Authority
) -> None:
    """It takes three, and is gone while the rest lies in its buffers, acknowledged by TCP."""
    entries(8)
    dying = SyslogCollector(tls, most=3)
    settings.AUDIT_EXPORT = to("syslog", dying.port, authority)
    assert export_for(0) == 0
    assert AuditExport.objects.get().sequence == 0
    dying.close()
    collector = SyslogCollector(tls)
    settings.AUDIT_EXPORT = to("syslog", collector.port, authority)
    AuditExport.objects.update(destination=settings.AUDIT_EXPORT.name, retry_at=None)
    assert export_for(0) == newest()
    assert sequences(dying) == [1, 2, 3]
    assert sequences(collector) == list(range(1, newest() + 1))
    collector.close()


def test_nothing_is_told_to_whom_the_authority_does_not_vouch_for(
    settings: Any, tls: ssl.SSLContext
) -> None:
    entries(1)
    impostor = SyslogCollector(tls)
    settings.AUDIT_EXPORT = to("syslog", impostor.port, Authority("another"))
    assert export_for(0) == 0
    assert "certificate" in AuditExport.objects.get().problem.lower()
    assert impostor.messages == []
    impostor.close()


def test_one_exports_at_a_time_and_who_died_with_the_lease_is_followed(
    settings: Any, tls: ssl.SSLContext, authority: Authority
) -> None:
    entries(3)
    collector = SyslogCollector(tls)
    settings.AUDIT_EXPORT = to("syslog", collector.port, authority)
    AuditExport.objects.create(
        destination=settings.AUDIT_EXPORT.name,
        claims=7,
        claimed_until=datetime.now(UTC) + timedelta(minutes=1),
    )
    assert export_for(0) == 0
    assert collector.connections == 0
    assert AuditExport.objects.get().claims == 7
    AuditExport.objects.update(claimed_until=datetime.now(UTC) - timedelta(seconds=1))
    assert export_for(0) == newest()
    collector.close()


def test_who_lost_the_lease_while_it_sent_moves_no_cursor(
    settings: Any, tls: ssl.SSLContext, authority: Authority, monkeypatch: Any
) -> None:
    entries(3)
    collector = SyslogCollector(tls)
    settings.AUDIT_EXPORT = to("syslog", collector.port, authority)

    def send(*given: Any) -> None:
        AuditExport.objects.update(claims=7)
        audit_export.send_syslog(*given)

    monkeypatch.setitem(audit_export._SEND, "syslog", send)
    assert export_for(0) == 0
    row = AuditExport.objects.get()
    assert (row.sequence, row.claims) == (0, 7)
    collector.close()


def test_otlp_takes_the_same_and_what_is_refused_comes_again(
    alice: Caller, settings: Any, tls: ssl.SSLContext, authority: Authority
) -> None:
    ended(alice)
    statuses = iter((503, 429, 200))
    collector = Receiver(lambda _: (next(statuses), {"Retry-After": "1"}), tls)
    settings.AUDIT_EXPORT = to(
        "otlp", collector.port, authority, path="/v1/logs", headers=(("Authorization", "Bearer x"),)
    )
    for arrived in (0, 0, newest()):
        assert export_for(0) == arrived
        again_at_once()
    collector.close()
    assert [path for path, _, _ in collector.requests] == ["/v1/logs"] * 3
    _, headers, body = collector.requests[-1]
    assert headers["authorization"] == "Bearer x"
    assert headers["content-type"] == "application/json"
    (resource,) = json.loads(body)["resourceLogs"]
    names = {each["key"] for each in resource["resource"]["attributes"]}
    assert "service.name" in names
    records = resource["scopeLogs"][0]["logRecords"]
    events = [json.loads(record["body"]["stringValue"]) for record in records]
    assert [event["metadata"]["sequence"] for event in events] == list(range(1, newest() + 1))
    assert all(len(record["timeUnixNano"]) == 19 for record in records)


def test_a_partial_success_is_none(
    settings: Any, tls: ssl.SSLContext, authority: Authority
) -> None:
    entries(2)
    collector = Receiver(
        tls=tls, body=json.dumps({"partialSuccess": {"rejectedLogRecords": "1"}}).encode()
    )
    settings.AUDIT_EXPORT = to("otlp", collector.port, authority, path="/v1/logs")
    assert export_for(0) == 0
    collector.close()
    row = AuditExport.objects.get()
    assert row.sequence == 0
    assert "1 of" in row.problem


@pytest.mark.django_db(transaction=True)
def test_a_slow_collector_holds_neither_the_task_nor_what_is_entered(
    alice: Caller,
    settings: Any,
    tls: ssl.SSLContext,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes the connection and says nothing: not even the handshake comes to an end."""
    monkeypatch.setattr(audit_export, "STEP_SECONDS", 1.0)
    monkeypatch.setattr(audit_export, "TURN_SECONDS", 0.0)
    silent = Silent()
    settings.AUDIT_EXPORT = to("syslog", silent.port, authority)
    entries(1)
    export_ledger()
    wait_for(lambda: silent.connections == 1)
    # While it waits, runs begin and end, are entered, and the next task begins nothing.
    before = newest()
    ended(alice)
    thread = in_thread(lambda: (ended(alice), connections.close_all()))
    thread.join()
    export_ledger()
    assert newest() == before + 2
    assert silent.connections == 1
    wait_for(lambda: bool(AuditExport.objects.get().problem))
    wait_for(lambda: AuditExport.objects.get().claimed_until is None)
    silent.close()


def test_what_is_no_statement_is_sent_as_what_it_is(alice: Caller) -> None:
    """Whoever writes to the database stops no export: the collector sees what does not fit."""
    opened(alice)
    at = datetime.now(UTC)
    entry = LedgerEntry(
        sequence=7, kind="x\n<1>", at=at, statement="no JSON\u0000", digest="d", key_id="k"
    )
    jsonschema.validate(event_of(entry), OCSF)
    assert event_of(entry)["raw_data"] == "no JSON\u0000"
    frame = audit_export.frame_of(entry, event_of(entry))
    length, _, message = frame.partition(b" ")
    assert int(length) == len(message)
    assert b"\n" not in message


def test_without_a_collector_nothing_is_done(settings: Any) -> None:
    settings.AUDIT_EXPORT = None
    assert export_for(0) == 0
    assert not AuditExport.objects.exists()

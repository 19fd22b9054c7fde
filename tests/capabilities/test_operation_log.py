"""One line for each operation, of executions, sessions, files and settings, all with one form."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from django.db import transaction

from executions.kernel.audit import _NAMES
from executions.ledger.models import LedgerEntry
from sandbox_site.logs import JsonLines
from tests.conftest import Caller
from tests.support.sessions import URL, cell, opened

pytestmark = pytest.mark.usefixtures("kept_here")


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What is written to stderr of them."""
    form = JsonLines()
    return [
        json.loads(form.format(record))
        for record in caplog.records
        if record.name == "executions.audit"
    ]


def test_a_session_from_its_opening_to_its_end_is_told_in_lines(
    alice: Caller, bob: Caller, charlie: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "executions.audit")
    session = opened(alice, name="a name of hers", saves="never")
    url = f"{URL}/{session['id']}/files/content?path=secret-name.txt"
    written = alice.client.put(url, b"secret content", content_type="application/octet-stream")
    assert written.status_code == 200
    assert cell(bob, session, "x = 'secret code'").status_code == 200
    b"".join(bob.client.get(url).streaming_content)
    assert charlie.client.get(url).status_code == 404
    assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204

    lines = lines_of(caplog)
    told = [(line["operation"], line["status"], line["tenant_id"]) for line in lines]
    assert told == [
        ("session.created", "success", "wonderland"),
        ("session.opened", "success", "wonderland"),
        ("write_file", "success", "wonderland"),
        ("execute_code", "success", "wonderland"),
        ("read_file", "success", "wonderland"),
        ("read_file", "http_404", "elsewhere"),
        ("session.closed", "success", "wonderland"),
    ]
    for line in lines:
        assert {*_NAMES, "timestamp", "operation", "status"} <= line.keys()
        # A stranger's line says nothing of a session that is not his.
        assert line["session_id"] == (None if line["tenant_id"] == "elsewhere" else session["id"])
    text = json.dumps(lines)
    assert "secret" not in text
    assert "a name of hers" not in text
    write, run, read = lines[2:5]
    assert write["received_bytes"] == len(b"secret content")
    assert write["duration_ms"] > 0
    assert (write["api_key"], read["api_key"]) == (alice.api_key.prefix, bob.api_key.prefix)
    assert run["execution_status"] == "succeeded"
    newest = LedgerEntry.objects.get(sequence=lines[-1]["ledger_sequence"])
    assert newest.digest == lines[-1]["ledger_digest"]
    assert lines[-1]["actor"] is not None


def test_what_is_rolled_back_has_no_line(alice: Caller, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "executions.audit")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        alice.tenant.save()
        raise ZeroDivisionError
    assert lines_of(caplog) == []
    alice.tenant.save()
    assert [line["operation"] for line in lines_of(caplog)] == ["tenant.changed"]

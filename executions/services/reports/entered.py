"""What the ledger says of a report that was made: the entry that has the hashes of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from executions.ledger.entry_format import column_of
from executions.ledger.executions import authentic
from executions.ledger.models import LedgerEntry
from executions.services.reports.signing import Signed

KIND = "report"


def entry_of(signed: Signed, public_keys: Mapping[str, str]) -> dict[str, Any] | None:
    """The authentic entry of the report that has this file; None without one."""
    digest = f"sha256:{signed.digest}"
    for entry in LedgerEntry.objects.filter(kind=KIND, subject=column_of(signed.report)):
        stated = authentic(entry, public_keys)
        if stated is None or (stated["kind"], stated["subject"]) != (KIND, signed.report):
            continue
        if digest in hashes_of(stated).values():
            return stated
    return None


def hashes_of(stated: Mapping[str, Any]) -> dict[str, str]:
    """By what a file is, the hash of what was signed of it."""
    return {"json": stated["json_hash"], "pdf": stated["pdf_hash"]}


def lines_of(stated: Mapping[str, Any]) -> list[str]:
    """What an entry says of its report, for whoever checks one."""
    told = [
        f"report {stated['subject']}, entered at {stated['at']} by {json.dumps(stated['made_by'])}",
        f"of {asked(stated['asked'])}",
        f"NOT INTACT: {stated['findings']} findings" if stated["findings"] else "INTACT",
    ]
    if stated["truncated"]:
        told.append(f"INCOMPLETE: it ends after {stated['runs']} runs")
    return told


def asked(stated: Mapping[str, Any]) -> str:
    tenant = json.dumps(stated["tenant"]) if stated["tenant"] else "every tenant"
    only = f", {len(stated['executions'])} executions" if stated["executions"] else ""
    since, until = stated["since"] or "the beginning", stated["until"] or "then"
    return f"{tenant}, runs made from {since} until {until}{only}"

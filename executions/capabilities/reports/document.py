"""The JSON file of a report: canonical, signed, and written as it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from executions.capabilities.policies.models import Policy
from executions.capabilities.reports import scope as scopes
from executions.capabilities.reports.reading import Reading, Told, holds_of
from executions.capabilities.reports.signing import JSON_START, JSON_SUBJECT, Signed, json_end, sign
from executions.ledger.entry import DOMAIN, SigningKey, canonical, keyring, moment, to_canonical
from executions.ledger.models import Verification
from providers.models import ConfigVersion

FORMAT = 1
_MOST_USED = 1000
_PIECE = 65_536


class Document:
    """`pieces` is the file. `kept` is told each run; once all pieces are taken, `signed` is what
    was signed and `told` all that the report says beside its runs."""

    def __init__(
        self, report_id: str, reading: Reading, key: SigningKey, made_by: str, made_at: datetime
    ) -> None:
        self.reading = reading
        self.key = key
        holds, more_holds = holds_of(reading)
        self.told: dict[str, Any] = {
            "asked": reading.scope.stated(),
            "domain": DOMAIN.decode().strip(),
            "format": FORMAT,
            "holds": holds,
            "id": report_id,
            "keys": [
                {"key_id": each.key_id, "algorithm": "Ed25519", "public_key": each.public_key}
                for each in keyring().values()
            ],
            "made_at": moment(made_at),
            "made_by": to_canonical(made_by),
            "more_holds": more_holds,
        }
        self.signed: Signed | None = None

    def pieces(self, keep: Callable[[str, dict[str, Any]], None]) -> Iterator[bytes]:
        """The whole file. `keep` is called with "gone", "runs" or "runs_gone", and each."""
        digest = hashlib.sha256()
        buffer: list[bytes] = []
        size = 0
        yield JSON_START
        for text in self._report(keep):
            data = text.encode()
            digest.update(data)
            buffer.append(data)
            size += len(data)
            if size > _PIECE:
                yield b"".join(buffer)
                buffer.clear()
                size = 0
        yield b"".join(buffer)
        self.signed = sign(self.key, JSON_SUBJECT, self.told["id"], digest.hexdigest())
        yield json_end(self.signed)

    def _report(self, keep: Callable[[str, dict[str, Any]], None]) -> Iterator[str]:
        """Its members in the order of their names, which the canonical form has; what is known at
        the end alone is named so that it stands there."""
        reading = self.reading
        lists = {"gone": reading.gone, "runs": reading.runs, "runs_gone": reading.gone}
        separator = "{"
        for name in sorted((*self.told, *lists)):
            yield f"{separator}{canonical(name)}:"
            separator = ","
            if name in lists:
                yield from _listed(lists[name](), partial(keep, name))
            else:
                yield canonical(self.told[name])
        verification = reading.verification()
        end = {
            "summary": {
                "runs": reading.read - reading.gone_read,
                "gone": reading.gone_read,
                "statuses": dict(reading.statuses),
                "bodies": dict(reading.bodies),
            },
            "truncated": scopes.MOST_RUNS if reading.truncated else None,
            "unknown": reading.unknown(),
            "used": _used(reading),
            "verification": _verification(verification, reading),
        }
        self.told.update(end)
        for name in sorted(end):
            yield f",{canonical(name)}:{canonical(end[name])}"
        yield "}"


def _listed(values: Iterable[Told], keep: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    separator = "["
    for value, text in values:
        keep(value)
        yield separator + text
        separator = ","
    yield "[]" if separator == "[" else "]"


def _verification(found: Verification, reading: Reading) -> Mapping[str, Any]:
    first, last = reading.span
    return {
        "intact": found.is_intact,
        "entries": found.entries,
        "first_entry": first,
        "last_entry": last,
        "head": found.head or None,
        "executions": found.executions,
        "findings": [
            {"kind": each.kind, "entry": each.sequence, "detail": to_canonical(each.detail)}
            for each in found.findings
        ],
        "more_findings": found.omitted,
    }


def _used(reading: Reading) -> dict[str, Any]:
    """The configuration and policy versions that runs name, as their rows are now."""
    pairs = sorted(reading.configurations)[:_MOST_USED]
    versions = ConfigVersion.objects.defer("content").filter(
        subject__in={provider for provider, _ in pairs},
        version__in={version for _, version in pairs},
    )
    rows = {(row.subject, row.version): row for row in versions}
    named = sorted(reading.policies)[:_MOST_USED]
    policies = {str(row.pk): row for row in Policy.objects.filter(pk__in={pk for pk, _ in named})}
    return {
        "configurations": [
            _configuration(provider, version, rows.get((provider, version)))
            for provider, version in pairs
        ],
        "policies": [
            {
                "id": pk,
                "version": version,
                "name": to_canonical(str(policies[pk])) if pk in policies else None,
            }
            for pk, version in named
        ],
        "more_configurations": len(reading.configurations) - len(pairs),
        "more_policies": len(reading.policies) - len(named),
    }


def _configuration(provider: str, version: int, row: ConfigVersion | None) -> dict[str, Any]:
    said: dict[str, Any] = {"provider": to_canonical(provider), "version": to_canonical(version)}
    if row is None:
        return {**said, "hash": None}
    return {
        **said,
        "hash": row.content_hash,
        "made_at": moment(row.created_at),
        "made_by": to_canonical(row.author),
        "approved_by": to_canonical(row.approved_by) or None,
        "reason": to_canonical(row.reason) or None,
    }

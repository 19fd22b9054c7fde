"""What the pool notes at a Pod is read by this pool alone, and at this Pod alone."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from providers.aes_gcm import seal
from providers.runtime.launchers.kubernetes.notes import Notes
from providers.runtime.pool.state_store import SandboxRecord, StateStore, boot, now

UID = "0123456789abcdef0123456789abcdef"


def record(seconds: float = 600.0) -> SandboxRecord:
    return SandboxRecord(
        container=UID,
        ref="ref",
        owner="alice@example.org",
        template="python",
        language="python",
        runtime="runc",
        limits={"memory_bytes": 1 << 28},
        interpreter="python 3.11.2",
        marker="ab" * 32,
        found={"pod": "p"},
        version=1,
        boot=boot(),
        opened_at=now(),
        expires_at=now() + seconds,
        seconds=seconds,
    )


def pod(annotations: dict[str, str], uid: str = UID) -> dict[str, Any]:
    return {"metadata": {"name": "p", "uid": uid, "annotations": annotations}}


def test_a_note_gives_the_record_back_and_shows_nothing_of_it() -> None:
    notes = Notes("secret")
    written = notes.write(record())
    found = notes.read(pod(written))
    assert found is not None
    assert (found.ref, found.owner, found.marker) == ("ref", "alice@example.org", "ab" * 32)
    assert 0 < found.left <= 600
    assert not any(word in str(written) for word in ("alice", "abab", "python"))


def test_a_note_counts_at_its_own_pod_and_with_the_key_of_its_pool_alone() -> None:
    written = Notes("secret").write(record())
    assert Notes("secret").read(pod(written, uid="f" * 32)) is None
    assert Notes("another").read(pod(written)) is None
    assert Notes("").read(pod(written)) is None
    assert Notes("").write(record()) == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"ends_at": 10**400},
        {"ends_at": float("nan")},
        {"ends_at": "soon"},
        {"seconds": 1e12},
        {"seconds": -1},
        {"marker": "no digits"},
        {"container": "f" * 32},
        {"more": 1},
    ],
    ids=str,
)
def test_a_note_that_is_no_record_is_none(changed: dict[str, Any]) -> None:
    copy = json.dumps({**json.loads(record().to_copy()), **changed}).encode()
    sealed = base64.b64encode(seal(["secret"], f"sandbox record {UID}", copy)).decode()
    assert Notes("secret").read(pod({"cofferdam.record": sealed})) is None


@pytest.mark.parametrize("text", ["", "no base64", "QUJD", "\udc80"])
def test_what_is_no_note_is_none(text: str) -> None:
    assert Notes("secret").read(pod({"cofferdam.record": text})) is None


def test_of_two_records_of_a_sandbox_the_later_lease_counts(tmp_path: Path) -> None:
    """A machine that had the sandbox before knows of a lease that another one has renewed."""
    store = StateStore(tmp_path, "pool", has_copies=True)
    assert store.take()
    store.save(record(1.0))
    assert store.knows("anything")  # it may be among what is not read yet

    store.restore([record()])

    (found,) = store.all()
    assert found.left > 500
    store.restore([record(1.0)])
    (found,) = store.all()
    assert found.left > 500
    assert not store.knows("anything")

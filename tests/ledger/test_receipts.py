"""Receipts: what a caller can check without asking us."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from examples.receipts import verify_receipt
from executions.ledger.models import LedgerEntry
from providers.models import ProviderPrice
from tests.conftest import Caller
from tests.support.processes import ROOT
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.database]

SCRIPT = ROOT / "examples" / "receipts" / "verify_receipt.py"
CODE = (
    "answer = ExecutionResult('out\\u00fc', 'err', 0, 0.0, {'runtime': 'odd'}, has_result=True,"
    " result={'b': [1, 2.5, None, '\\u00fc'], 'a': 1e22},"
    " outputs=[{'text/plain': '\\u00fc', 'application/json': {'b': 1, 'a': 2.0}}],"
    " artifacts=[ArtifactFile('a.txt', 'text/plain', b'content')])"
)


@pytest.fixture
def answer(scripted: object, alice: Caller) -> Any:
    return run(alice, CODE).json()


@pytest.fixture
def keys(tmp_path: Path, db: None) -> Path:
    """What anybody gets without a key, kept in a file."""
    published = Client().get("/api/v1/ledger/keys")
    assert published.status_code == 200
    path = tmp_path / "keys.json"
    path.write_bytes(published.content)
    return path


def check(document: Any, keys: Path, *arguments: str) -> tuple[int, str]:
    """The script in a process of its own, without this project: its exit code and what it says."""
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), "-", "--keys", str(keys), *arguments],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        cwd=keys.parent,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_answer_and_its_receipt_are_valid(answer: Any, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CODE)
    (tmp_path / "a.txt").write_bytes(b"content")

    code, said = check(answer, keys, "--code", "program.py", "--artifact", "a.txt")

    assert (code, said.partition(":")[0]) == (0, "valid"), said
    assert "scripted" in said
    assert check(answer["receipt"], keys)[0] == 0


def test_the_receipt_names_what_was_run_where_and_what_came_of_it(answer: Any) -> None:
    receipt = answer["receipt"]
    assert receipt["code_hash"] == "sha256:" + hashlib.sha256(CODE.encode()).hexdigest()
    result = json.dumps(answer["result"], ensure_ascii=False, separators=(",", ":"))
    assert receipt["result_hash"] == "sha256:" + hashlib.sha256(result.encode()).hexdigest()
    assert (receipt["provider"], receipt["runtime"]) == ("scripted", "odd")
    assert receipt["config_version"] > 0
    assert "image_digest" in receipt
    assert receipt["at"] >= receipt["finished_at"]
    assert receipt["sequence"] == LedgerEntry.objects.get(kind="execution").sequence


def test_the_receipt_stays_the_same(answer: Any, alice: Caller, bob: Caller) -> None:
    for caller in (alice, bob):
        again = caller.client.get(f"/api/v1/executions/{answer['id']}").json()
        assert again["receipt"] == answer["receipt"]


def test_a_stranger_gets_no_receipt(answer: Any, charlie: Caller) -> None:
    assert charlie.client.get(f"/api/v1/executions/{answer['id']}").status_code == 404


def test_what_is_queued_has_no_receipt_yet(scripted: object, alice: Caller, keys: Path) -> None:
    queued = run(alice, CODE, mode="async").json()
    assert queued["receipt"] is None
    assert check(queued, keys)[0] == 2


def test_the_answer_of_an_error_has_a_receipt_too(
    scripted: object, alice: Caller, keys: Path
) -> None:
    response = run(alice, "raise errors.ProviderUnavailable('It is out.')")
    answer = response.json()

    assert response.status_code == 503
    assert check(answer, keys)[0] == 0
    for changed in ({"id": "other"}, {"error": {**answer["error"], "code": "SB003"}}):
        assert check({**answer, **changed}, keys)[0] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", "failed"),
        ("result", {"a": 1}),
        ("outputs", []),
        ("outputs", [{"text/plain": "other"}]),
        ("stdout", "other"),
        ("stderr", ""),
        ("exit_code", 1),
        ("provider", "other"),
        ("runtime", "gvisor"),
        ("artifacts", []),
        ("id", "00000000-0000-0000-0000-000000000000"),
        ("error", {"code": "SB005", "message": ""}),
        ("has_result", False),
    ],
)
def test_a_changed_answer_is_noticed(answer: Any, keys: Path, name: str, value: Any) -> None:
    code, said = check({**answer, name: value}, keys)
    assert (code, said.partition(":")[0]) == (1, "NOT VALID"), said


def test_every_changed_field_of_a_receipt_is_noticed(answer: Any, keys: Path) -> None:
    trusted = json.loads(keys.read_text())
    assert not list(verify_receipt.signature_problems(answer["receipt"], trusted))
    for name in answer["receipt"]:
        changed = copy.deepcopy(answer["receipt"])
        changed[name] = "changed"
        assert list(verify_receipt.signature_problems(changed, trusted)), name
        del changed[name]
        assert list(verify_receipt.signature_problems(changed, trusted)), name


def test_other_code_or_another_artifact_is_noticed(answer: Any, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    assert "is not the code" in check(answer, keys, "--code", "other")[1]
    assert "no artifact named" in check(answer, keys, "--artifact", "other")[1]
    assert "is not the artifact" in check(answer, keys, "--artifact", "a.txt=other")[1]


def test_a_key_that_is_not_trusted_proves_nothing(answer: Any, keys: Path) -> None:
    keys.write_text('{"keys": []}')
    assert check(answer, keys)[0] == 1


@pytest.mark.parametrize("document", [[], "x", {}, {"receipt": 1}])
def test_what_is_no_answer_cannot_be_checked(document: Any, keys: Path) -> None:
    code, said = check(document, keys)
    assert code in (1, 2)
    assert "Traceback" not in said


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in an answer, the inner nodes as well."""
    if path:
        yield path
    if isinstance(value, dict):
        children = list(value.items())
    else:
        children = list(enumerate(value)) if isinstance(value, list) else []
    for name, child in children:
        if name != "receipt":
            yield from leaves(child, (*path, name))


def others(value: Any) -> list[Any]:
    """Values that somebody might put in the place of this one."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, (int, float)):
        return [value + 1, -value - 1, None, str(value)]
    if isinstance(value, str):
        return [value + "x", "", None]
    if isinstance(value, list):
        return [[*value, {}], [], None]
    if isinstance(value, dict):
        return [{**value, "more": 1}, {}, None]
    return ["x", 0, {"code": "SB009", "message": "x"}]


ANSWERS = {
    "succeeded": CODE,
    "nothing": "answer = ExecutionResult('', '', 0, 0.0)",
    "timed out": (
        "answer = ExecutionResult('a', 'b', 137, 0.0, timed_out=True, stdout_truncated=True)"
    ),
    "failed": "answer = ExecutionResult('', 'Traceback', 1, 0.0, stderr_truncated=True)",
    "error": "raise errors.ProviderUnavailable('It is out.', field='endpoint')",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_field_of_an_answer_is_bound_or_named_as_not_bound(
    scripted: object,
    alice: Caller,
    keys: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ProviderPrice.objects.create(provider_id="scripted", per_second=Decimal("0.5"))
    answer = run(alice, ANSWERS[name]).json()
    monkeypatch.chdir(keys.parent)

    def said(document: Any) -> tuple[int, str]:
        Path("answer.json").write_text(json.dumps(document))
        monkeypatch.setattr("sys.argv", ["verify", "answer.json", "--keys", str(keys)])
        code = verify_receipt.main()
        return code, capsys.readouterr().out

    code, printed = said(answer)
    assert code == 0, printed
    unbound = {
        field
        for line in printed.splitlines()
        if line.startswith("not bound by the receipt: ")
        for field in line.partition(": ")[2].split(", ")
    }
    # A late result is entered in the ledger by itself, after the receipt was given; by which
    # schedule, what was seen of it and what was left out are bound by the hash over the record
    # alone. Advice is as of now, and recorded nowhere.
    told_alone = {"late_result", "files_saved", "restored", "schedule", "observations", "network"}
    told_alone |= {"template", "advice"}
    told_alone |= {"artifacts_skipped", "outputs_skipped"}
    assert unbound <= {"artifacts[].url", *told_alone}
    tried = 0
    for path in leaves(answer):
        named = "".join("[]" if isinstance(step, int) else f".{step}" for step in path)[1:]
        if {named, path[0]} & unbound:
            continue
        holder = answer
        for step in path[:-1]:
            holder = holder[step]
        for other in others(holder[path[-1]]):
            changed = copy.deepcopy(answer)
            holder_of_it = changed
            for step in path[:-1]:
                holder_of_it = holder_of_it[step]
            holder_of_it[path[-1]] = other
            if _says_the_same(answer, changed):
                continue
            tried += 1
            code, printed = said(changed)
            added = f"{named}.more" if isinstance(other, dict) and "more" in other else ""
            told = any(
                line.startswith("not bound") and added.rpartition("[]")[2].strip(".") in line
                for line in printed.splitlines()
            )
            assert code != 0 or (added and told), (path, other, printed)
    assert tried > 3


def _says_the_same(answer: Any, changed: Any) -> bool:
    """No provider and an empty one are one, for a run that none was chosen for."""

    def plain(document: Any) -> Any:
        empty = {"provider", "runtime"} & document.keys()
        return {**document, **{name: document[name] or None for name in empty}}

    return bool(plain(answer) == plain(changed))


# RFC 8032, section 7.1, tests 1 to 3: key, message, signature.
VECTORS = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("public_key", "message", "signature"), VECTORS)
def test_the_script_checks_signatures_as_the_standard_does(
    public_key: str, message: str, signature: str
) -> None:
    key, text, signed = map(bytes.fromhex, (public_key, message, signature))
    assert verify_receipt.is_signed(key, text, signed)
    assert not verify_receipt.is_signed(key, text + b"x", signed)
    for position in (0, 31, 32, 63):
        wrong = bytearray(signed)
        wrong[position] ^= 1
        assert not verify_receipt.is_signed(key, text, bytes(wrong))
    # The same scalar plus the group's order: malleable, so refused.
    scalar = int.from_bytes(signed[32:], "little") + verify_receipt.ORDER
    assert not verify_receipt.is_signed(key, text, signed[:32] + scalar.to_bytes(32, "little"))
    assert not verify_receipt.is_signed(b"\xff" * 32, text, signed)
    assert not verify_receipt.is_signed(key, text, signed[:63])


def test_the_keys_are_public_and_without_their_private_half(
    client: Client, settings: Any, db: None
) -> None:
    answer = client.get("/api/v1/ledger/keys")
    assert [set(key) for key in answer.json()["keys"]] == [{"key_id", "algorithm", "public_key"}]
    assert settings.LEDGER_KEYS[0] not in answer.content.decode()
    assert client.post("/api/v1/ledger/keys").status_code == 405

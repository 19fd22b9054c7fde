"""What is left out of a run is said in each answer about it, with the reason."""

from __future__ import annotations

import json
from typing import Any

from executions.doors.native.rendering import execution_for
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key
from executions.tenants.models import Tenant
from executions.tenants.service import AUDITOR
from tests.conftest import Caller
from tests.support.roles import member
from tests.support.running import run, run_queued

CODE = """
import os
for n in range(21): open(f'artifacts/{n:02}.csv', 'w').close()
os.symlink('00.csv', 'artifacts/link')
os.makedirs('artifacts/a/b/c/d/e')
open('artifacts/a/b/c/d/e/deep.txt', 'w').write('x')
for n in range(22): display(n)
print('x' * 1_100_000)
"""
FILES = [
    {"name": "20.csv", "reason": "too many files: at most 20 are kept"},
    {"name": "link", "reason": "a symbolic link: links are not followed"},
    {
        "name": "a/b/c/d/e/deep.txt",
        "reason": "too deep: a kept file has at most 4 folders above it",
    },
]
OUTPUTS = [
    {"name": "stdout", "reason": "cut: the first 1000000 bytes are kept"},
    {"name": "output 21", "reason": "too many outputs: at most 20 are kept"},
    {"name": "output 22", "reason": "too many outputs: at most 20 are kept"},
]


def skipped(answer: dict[str, Any]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    files = sorted(answer["artifacts_skipped"], key=FILES.index)
    return files, answer["outputs_skipped"]


def test_an_answer_names_the_files_and_the_outputs_that_it_has_not(
    local_active: None, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    answer = run(alice, CODE).json()
    assert answer["status"] == "succeeded"
    assert skipped(answer) == (FILES, OUTPUTS)

    path = f"/api/v1/executions/{answer['id']}"
    assert skipped(bob.client.get(path).json()) == (FILES, OUTPUTS)
    assert charlie.client.get(path).status_code == 404


def test_where_nothing_is_left_out_both_are_empty(local_active: None, alice: Caller) -> None:
    answer = run(alice, "open('artifacts/a', 'w').close()\ndisplay(1)\nprint(1)").json()
    assert (answer["artifacts_skipped"], answer["outputs_skipped"]) == ([], [])


def test_a_key_that_may_not_read_is_not_told_of_another_keys_run(
    local_active: None, alice: Caller
) -> None:
    execution = Execution.objects.get(pk=run(alice, CODE).json()["id"])
    blind = Caller(*create_api_key(alice.tenant, "blind", None, scopes="execute"))
    told = execution_for(blind.api_key, execution, str)
    assert (told["artifacts_skipped"], told["outputs_skipped"]) == ([], [])
    told = execution_for(alice.api_key, execution, str)
    assert skipped(told) == (FILES, OUTPUTS)


def test_one_that_was_queued_says_the_same(local_active: None, alice: Caller) -> None:
    queued = run(alice, CODE, mode="async").json()
    assert (queued["artifacts_skipped"], queued["outputs_skipped"]) == ([], [])
    assert run_queued()
    answer = alice.client.get(f"/api/v1/executions/{queued['id']}").json()
    assert skipped(answer) == (FILES, OUTPUTS)


def test_a_stream_says_it_with_its_last_event(local_active: None, alice: Caller) -> None:
    answer = alice.client.post(
        "/api/v1/executions", {"code": CODE}, headers={"Accept": "application/x-ndjson"}
    )
    events = [json.loads(line) for line in b"".join(answer.streaming_content).splitlines()]
    assert events[-1]["type"] == "done"
    assert skipped(events[-1]["execution"]) == (FILES, OUTPUTS)


def test_an_auditor_reads_it_on_the_page_of_the_execution(
    local_active: None, alice: Caller
) -> None:
    code = "import os\nos.symlink('x', 'artifacts/a\\u202eb<script>')"
    answer = run(alice, code).json()
    page = member(AUDITOR).get(f"/admin/executions/execution/{answer['id']}/change/")
    text = page.content.decode()
    told = "file a[U+202E]b&lt;script&gt; was left out: a symbolic link: links are not followed"
    assert told in text
    assert "\u202e" not in text


def test_a_tenant_has_limits_of_its_own(local_active: None, alice: Caller, charlie: Caller) -> None:
    Tenant.objects.filter(pk=alice.tenant.pk).update(
        max_artifacts=30, max_outputs=2, max_output_kb=1, max_artifact_mib=12, max_artifacts_mib=24
    )
    alice.tenant.refresh_from_db()
    code = """
open('artifacts/0.bin', 'wb').write(bytes(12 << 20))
for n in range(25): open(f'artifacts/{n:02}.csv', 'w').close()
for n in range(3): display(n)
print('x' * 2000)
"""
    answer = run(alice, code).json()
    assert (len(answer["artifacts"]), answer["artifacts_skipped"]) == (26, [])
    assert answer["outputs_skipped"] == [
        {"name": "stdout", "reason": "cut: the first 1000 bytes are kept"},
        {"name": "output 3", "reason": "too many outputs: at most 2 are kept"},
    ]

    others = run(charlie, code).json()
    assert len(others["artifacts"]) == 20
    assert others["artifacts_skipped"][0]["reason"].startswith("too large: at most 10485760")
    assert others["outputs_skipped"] == []


def test_an_event_is_one_line_to_every_reader_of_lines(local_active: None, alice: Caller) -> None:
    text = "a\u2028b\u2029c\x85d"
    body = {"code": f"print({text!r})\ndef main(): return {text!r}"}
    answer = alice.client.post(
        "/api/v1/executions", body, headers={"Accept": "application/x-ndjson"}
    )
    content = b"".join(answer.streaming_content).decode()
    events = [json.loads(line) for line in content.splitlines()]
    assert [event["text"] for event in events if event["type"] == "stdout"] == [f"{text}\n"]
    assert events[-1]["execution"]["result"] == text

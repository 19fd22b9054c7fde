"""The management commands, as an operator's script would use them."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command, get_commands
from django.utils import timezone

from executions.runs.models import Execution
from executions.tenants.keys import authenticate
from executions.tenants.models import ApiKey, Tenant
from tests.conftest import Caller

TESTED = {
    *(
        "create_tenant",
        "create_api_key",
        "rotate_api_key",
        "execute",
        "end_stale_executions",
        "record_journal",
    ),
    *("recount_executions", "check_storage"),
    *("verify_ledger", "checkpoint_ledger", "adopt_ledger_key", "accept_row"),
    *("apply_retention", "export_executions", "dry_run_policy"),
    *("claude_worker", "code_exec", "audit_report", "codex_config", "mcp", "network_credential"),
    "template",
}


def execute(*arguments: str) -> int:
    """The exit code a shell would see."""
    try:
        call_command("execute", *arguments)
    except SystemExit as end:
        return int(end.code or 0)
    except CommandError as error:
        return error.returncode
    raise AssertionError("it did not end with an exit code")


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(code: str | bytes) -> str:
        path = tmp_path / "script"
        path.write_bytes(code if isinstance(code, bytes) else code.encode())
        return str(path)

    return write


def test_every_command_is_tested_here_or_with_its_own_feature() -> None:
    assert {name for name, app in get_commands().items() if app == "executions"} == TESTED


def test_create_tenant(db: None) -> None:
    call_command("create_tenant", "acme", "--name", "Acme Inc.")
    call_command("create_tenant", "plain")

    assert set(Tenant.objects.values_list("slug", "name", "is_active")) == {
        ("acme", "Acme Inc.", True),
        ("plain", "plain", True),
    }


@pytest.mark.parametrize("slug", ["Not A Slug", "", "x" * 65, "ü"])
def test_create_tenant_refuses_a_bad_slug(slug: str, db: None) -> None:
    with pytest.raises(CommandError, match="slug"):
        call_command("create_tenant", slug)
    assert not Tenant.objects.exists()


def test_create_tenant_refuses_a_second_of_the_same(alice: Caller) -> None:
    with pytest.raises(CommandError, match="already exists"):
        call_command("create_tenant", "wonderland")
    assert Tenant.objects.count() == 1


def test_create_api_key_prints_the_key_alone(
    alice: Caller, capsys: pytest.CaptureFixture[str]
) -> None:
    call_command("create_api_key", "wonderland", "--name", "script")

    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    api_key = authenticate(printed.out.strip())
    assert (api_key.tenant, api_key.name, api_key.expires_at) == (alice.tenant, "script", None)


def test_create_api_key_can_set_an_end(alice: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("create_api_key", "wonderland", "--name", "x", "--expires-in-days", "2")

    expires_at = authenticate(capsys.readouterr().out.strip()).expires_at
    assert expires_at is not None
    assert timedelta(days=1.9) < expires_at - timezone.now() < timedelta(days=2)


def test_create_api_key_names_what_there_is(alice: Caller) -> None:
    """As the form of the admin does, by the same rule."""
    with pytest.raises(CommandError, match=r"pyton: Unknown name.*python"):
        call_command("create_api_key", "wonderland", "--name", "x", "--language", "pyton")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nobody", "--name", "x"),
        ("wonderland", "--name", ""),
        ("wonderland", "--name", "x", "--expires-in-days", "0"),
        ("wonderland", "--name", "x", "--expires-in-days", "9999999"),
        ("wonderland", "--name", "x", "--language", "pyton"),
        ("wonderland", "--name", "x", "--language", "python", "--language", "pyton"),
        ("wonderland", "--name", "x", "--provider", "locla"),
    ],
)
def test_create_api_key_refuses(arguments: tuple[str, ...], alice: Caller) -> None:
    with pytest.raises(CommandError):
        call_command("create_api_key", *arguments)
    assert ApiKey.objects.count() == 1


def test_execute_passes_output_and_exit_code_through(
    local_active: None, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(9)")

    assert execute(path) == 9

    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("out\n", "err\n")
    record = Execution.objects.get()
    assert (record.tenant_slug, record.exit_code) == ("internal", 9)


def test_execute_calls_main_with_the_arguments_and_prints_its_value(
    local_active: None, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("def main(a, b):\n    print('adding')\n    return {'sum': a + b}")

    assert execute(path, "--arguments", '{"a": 1, "b": 2}') == 0
    assert capsys.readouterr().out == 'adding\n{"sum":3}\n'


def test_execute_runs_another_language(
    local_active: None, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(script("echo shell"), "--language", "bash") == 0
    assert capsys.readouterr().out == "shell\n"


def test_execute_reads_standard_input(
    local_active: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("print('grüße')".encode())))

    assert execute("-") == 0
    assert capsys.readouterr().out == "grüße\n"


def test_execute_can_print_all_there_is_as_json(
    local_active: None, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(script("print('x')\nraise SystemExit(3)"), "--json") == 3

    printed = json.loads(capsys.readouterr().out)
    assert (printed["stdout"], printed["exit_code"], printed["status"]) == ("x\n", 3, "failed")
    assert printed["id"] == str(Execution.objects.get().pk)


def test_execute_tells_code_that_was_ended_from_code_that_ended(
    local_active: None, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(script("while True: pass"), "--timeout", "0.5") == 124
    assert "SB005" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("", ()),
        ("print(1)", ("--language", "cobol")),
        ("print(1)", ("--arguments", "[1]")),
        ("print(1)", ("--arguments", "{")),
        ("print(1)", ("--timeout", "0")),
        (b"\xff\xfe", ()),
    ],
)
def test_execute_refuses_what_cannot_be_run(
    code: str | bytes, arguments: tuple[str, ...], scripted: Any, script: Any
) -> None:
    assert execute(script(code), *arguments) == 125
    assert scripted() == []
    assert Execution.objects.count() == 0


def test_execute_refuses_a_file_that_is_not_there(db: None, tmp_path: Path) -> None:
    assert execute(str(tmp_path / "nothing")) == 125


def test_execute_says_what_kept_the_code_from_running(
    scripted: object, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(script("raise errors.ConnectionFailed('no line')")) == 125
    assert "SB003: no line" in capsys.readouterr().err

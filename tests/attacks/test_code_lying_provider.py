"""A provider that answers what it likes: what is kept is bounded, sound, and never a success."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from django.conf import settings

from executions.runs import provider_calls
from executions.runs.models import Artifact, Execution
from executions.runs.results import REFUSED
from providers.errors import ConnectionFailed, SandboxError
from providers.models import CircuitBreaker
from providers.values import ArtifactFile, RunLimits
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.routing import last_execution
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

KEPT = RunLimits()


def test_five_megabytes_of_output_are_cut_and_flagged(liar: Liar, alice: Caller) -> None:
    liar.answers(stdout="x" * 5_000_000, stderr="漢" * 2_000_000)
    answer = run(alice, "print(1)").json()
    assert (answer["stdout_truncated"], answer["stderr_truncated"]) == (True, True)
    most = settings.SANDBOX_MAX_OUTPUT_KB * 1000
    assert len(answer["stdout"]) == most
    assert 0 < len(answer["stderr"].encode()) <= most
    assert last_execution().stdout == answer["stdout"]


def test_fifty_artifacts_are_twenty(liar: Liar, alice: Caller) -> None:
    files = [ArtifactFile(f"{number}.txt", "text/plain", b"x") for number in range(50)]
    liar.answers(artifacts=files)
    answer = run(alice, "print(1)").json()
    assert [each["name"] for each in answer["artifacts"]] == [f"{n}.txt" for n in range(20)]
    skipped = last_execution().meta["artifacts_skipped"]
    reason = "too many files: at most 20 are kept"
    assert skipped == [[f"{number}.txt", reason] for number in range(20, 50)]
    assert answer["artifacts_skipped"] == [
        {"name": name, "reason": reason} for name, reason in skipped
    ]


def test_an_artifact_of_40_megabytes_is_left_out(liar: Liar, alice: Caller) -> None:
    files = [("large.bin", 40 << 20), ("a.bin", 9 << 20), ("b.bin", 9 << 20), ("c.bin", 9 << 20)]
    liar.answers(artifacts=[ArtifactFile(name, "x/y", bytes(size)) for name, size in files])
    answer = run(alice, "print(1)").json()
    assert [each["name"] for each in answer["artifacts"]] == ["a.bin", "b.bin"]
    assert sum(Artifact.objects.values_list("size_bytes", flat=True)) <= KEPT.artifacts_total_bytes
    assert last_execution().meta["artifacts_skipped"] == [
        ["large.bin", "too large: at most 10485760 bytes are kept"],
        ["c.bin", "too large: at most 20971520 bytes are kept in total for all files"],
    ]


EVIL_NAMES = (
    "../../evil", "/etc/cron.d/evil", "a/../../evil", "nul\0", "a//b", ".", "", "x" * 501,
    "y" * 256, "lone\ud800", "new\nline", 7, None,
)  # fmt: skip


def test_a_name_that_is_no_relative_path_is_left_out(liar: Liar, alice: Caller) -> None:
    names: Any = [*EVIL_NAMES, "good.txt", "good.txt"]
    liar.answers(artifacts=[ArtifactFile(name, "text/plain", b"x") for name in names])
    answer = run(alice, "print(1)").json()
    assert [each["name"] for each in answer["artifacts"]] == ["good.txt"]
    assert len(last_execution().meta["artifacts_skipped"]) == len(EVIL_NAMES) + 1


@pytest.mark.parametrize("code", ["7", "0", False, True, 1.0, 10**30, -(10**30), [0], object()])
def test_an_exit_code_that_is_none_is_no_success(liar: Liar, alice: Caller, code: Any) -> None:
    liar.answers(exit_code=code)
    answer = run(alice, "print(1)").json()
    assert (answer["status"], answer["exit_code"]) == ("failed", None)
    assert last_execution().meta[REFUSED][0].startswith("exit_code: ")


@pytest.mark.parametrize("answer", [None, "x", {}, 0, {"exit_code": 0, "stdout": ""}, Exception])
def test_what_is_no_result_is_an_error(liar: Liar, alice: Caller, answer: Any) -> None:
    liar.does("run", lambda: answer)
    assert_started_error(run(alice, "print(1)"))
    assert "close" in liar.calls


class Own(BaseException):
    """No Exception at all."""


def raising(error: BaseException) -> Any:
    def action() -> None:
        raise error

    return action


EXCEPTIONS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Own(), MemoryError(), OSError(5)]


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_an_exception_of_its_own_ends_no_service(
    liar: Liar, alice: Caller, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    liar.does("run", raising(error))
    assert_started_error(run(alice, "print(1)"))
    logged = [
        record for record in caplog.records if record.name == "executions.runs.provider_calls"
    ]
    assert any(record.exc_info for record in logged)
    liar.does("run", lambda: None)
    liar.answers()
    assert run(alice, "print(1)").json()["status"] == "succeeded"


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["open", "isolation"])
def test_one_raised_before_the_code_was_there_may_be_tried_again(
    liar: Liar, alice: Caller, error: BaseException, method: str
) -> None:
    liar.does(method, raising(error))
    response = run(alice, "print(1)")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "SB009")
    assert last_execution().retryable
    assert "run" not in liar.calls


# It starts in the caller's own thread, where somebody at a terminal may have interrupted.
@pytest.mark.parametrize(
    "error",
    [error for error in EXCEPTIONS if not isinstance(error, KeyboardInterrupt)],
    ids=lambda error: type(error).__name__,
)
def test_one_raised_when_it_starts_is_no_end_either(
    liar: Liar, alice: Caller, error: BaseException
) -> None:
    liar.does("initialize", raising(error))
    assert run(alice, "print(1)").status_code == 503


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_one_raised_when_asked_for_its_languages_costs_no_run(
    liar: Liar, alice: Caller, error: BaseException
) -> None:
    liar.does("get_supported_languages", raising(error))
    assert run(alice, "print(1)").json()["status"] == "succeeded"


def test_what_it_raises_in_destroying_costs_no_answer(liar: Liar, alice: Caller) -> None:
    liar.does("close", raising(SystemExit(3)))
    assert run(alice, "print(1)").json()["status"] == "succeeded"


class Odd(SandboxError):
    entry = "SB000"  # type: ignore[assignment]


def odd_errors() -> list[SandboxError]:
    message: Any = b"\0" * 3
    wide = ConnectionFailed("x" * 10_000_000, field="\ud800", started=True)
    wide.retry_after = float("nan")
    kind = ConnectionFailed(message)
    kind.field = 7  # type: ignore[assignment]
    return [Odd("x"), wide, kind]


@pytest.mark.parametrize("number", range(3))
def test_an_error_that_is_unsound_is_told_soundly(liar: Liar, alice: Caller, number: int) -> None:
    liar.does("run", raising(odd_errors()[number]))
    response = run(alice, "print(1)")
    assert response.status_code in (502, 503)
    execution = last_execution()
    assert execution.status == "error"
    assert len(execution.error_message) <= 2000


def test_a_run_that_outlasts_its_time_is_answered_all_the_same(
    liar: Liar, alice: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`timeout: 2` and a provider that takes as long as it likes, here until the test lets go."""
    monkeypatch.setattr("executions.runs.service.RUN_SLACK_SECONDS", 0.5)
    go, gone = threading.Event(), threading.Event()

    def late() -> Any:
        go.wait(60)
        try:
            return honest()
        finally:
            gone.set()

    honest = liar.module.ExecutionResult
    liar.module.behaviour["run"] = late
    honest = lambda: liar.module.ExecutionResult("late", "", 0, 31.0)  # noqa: E731
    began = time.monotonic()
    response = run(alice, "print(1)", timeout=2)
    assert 2 < time.monotonic() - began < 60
    assert_started_error(response)
    assert "did not answer within 2.5 s" in response.json()["error"]["message"]
    assert provider_calls._overdue["liar", alice.tenant.slug] == 1
    go.set()
    assert gone.wait(60)
    deadline = time.monotonic() + 60
    while provider_calls._overdue["liar", alice.tenant.slug] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert provider_calls._overdue["liar", alice.tenant.slug] == 0
    execution = last_execution()
    assert (execution.status, execution.stdout) == ("error", "")


def test_a_sandbox_that_comes_too_late_is_destroyed(
    liar: Liar, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executions.runs.service.CREATE_SECONDS", 0.3)
    go = threading.Event()

    def late() -> Any:
        go.wait(60)
        return liar.module.LiarsSandbox()

    liar.does("open", late)
    response = run(alice, "print(1)")
    assert (response.status_code, last_execution().retryable) == (503, True)
    assert "run" not in liar.calls
    go.set()
    deadline = time.monotonic() + 60
    while "close" not in liar.calls and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "close" in liar.calls


def test_a_provider_with_too_many_calls_overdue_is_not_asked_again(
    liar: Liar, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = provider_calls.MOST_OVERDUE_OF_ONE
    monkeypatch.setitem(provider_calls._overdue, ("liar", alice.tenant.slug), most)
    assert run(alice, "print(1)").status_code == 429
    assert "open" not in liar.calls


def test_what_one_tenant_leaves_overdue_costs_the_others_nothing(
    liar: Liar, alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * provider_calls.MOST_OVERDUE_OF_ONE <= provider_calls.MOST_OVERDUE
    most = provider_calls.MOST_OVERDUE_OF_ONE
    monkeypatch.setitem(provider_calls._overdue, ("liar", alice.tenant.slug), most)
    assert run(alice, "print(1)").status_code == 429
    assert run(charlie, "print(1)").json()["status"] == "succeeded"
    shares = {("liar", f"tenant {number}"): 1 for number in range(provider_calls.MOST_OVERDUE)}
    monkeypatch.setattr(provider_calls, "_overdue", Counter(shares))
    assert run(charlie, "print(1)").status_code == 429


def test_what_was_begun_is_ended_however_many_calls_are_overdue(
    liar: Liar, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*args: Any, **options: Any) -> Any:
        most = provider_calls.MOST_OVERDUE_OF_ONE
        monkeypatch.setitem(provider_calls._overdue, ("liar", alice.tenant.slug), most)
        return liar.module.LiarsSandbox()

    liar.does("open", create)
    assert run(alice, "print(1)").json()["status"] == "succeeded"
    assert "close" in liar.calls


def test_what_it_does_after_the_code_is_there_opens_no_breaker(
    liar: Liar, alice: Caller, doubted: list[str]
) -> None:
    from tests.support.routing import make_route

    make_route("liar")
    liar.does("run", raising(SystemExit(3)))
    for _ in range(4):
        assert_started_error(run(alice, "print(1)"))
    assert CircuitBreaker.objects.get(provider_id="liar").failures == 0
    assert doubted == ["liar"]


def assert_started_error(response: Any) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "SB009")
    execution = last_execution()
    assert (execution.status, execution.retryable) == (Execution.Status.ERROR, False)

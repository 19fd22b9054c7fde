"""What a process of the service still does when it ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from executions.kernel import background
from executions.runs import active_runs, worker
from sandbox_site import gunicorn_conf

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]


@pytest.mark.parametrize("kind", ["web", "worker"])
def test_a_process_that_ends_does_first_what_was_delayed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_runs, "end_all", lambda seconds: None)
    monkeypatch.setattr(active_runs, "shutdown", lambda: None)
    runner = worker.Runner(1, lambda: False)
    ended = threading.Thread()
    ended.start()
    ended.join()
    monkeypatch.setattr(worker, "threading", SimpleNamespace(main_thread=lambda: ended))
    saved = background.submit_keyed("session", "wonderland", lambda: "saved", delay_seconds=3600)
    if kind == "web":
        gunicorn_conf.worker_exit(SimpleNamespace(), SimpleNamespace())
    else:
        runner.stop_in_time()
    assert saved.result(60) == "saved"

"""What is shipped for Prometheus and Grafana, held against a real Prometheus that scrapes us."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.utils import timezone

from executions.capabilities.alerts.models import Alert
from executions.capabilities.observability.models import AuditExport
from executions.runs.models import Process
from executions.sessions.models import Session
from providers.models import CircuitBreaker, ProviderConfig, ProviderHealth
from tests.conftest import Caller, require
from tests.support.ended_runs import ended
from tests.support.held import opened
from tests.support.processes import ROOT

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "cofferdam.json"
TOKEN = "a token that Prometheus is given"
NAME = re.compile(r"cofferdam_[a-z_0-9]+")


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_rules_are_what_promtool_accepts() -> None:
    done = subprocess.run(
        [require("promtool"), "check", "rules", RULES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def everything(alice: Caller) -> None:
    """Something of each kind that there is a metric of, and more than the alerts allow."""
    hop = {"provider": "e2b", "outcome": "failed", "code": "SB003", "reason": "x", "ms": 1.0}
    for _ in range(3):
        ended(alice, queue_ms=1.0, start_ms=9.0, run_ms=9000.0, total_ms=9010.0, cost="0.5")
        ended(alice, "error", error_code="SB003", retryable=True, hops=[hop])
    ended(alice, "failed", observed="sigsys")
    opened(alice, "async")
    Session.objects.create(tenant=alice.tenant, tenant_slug="wonderland", language="python")
    ProviderConfig.objects.create(provider_id="local", is_active=True)
    CircuitBreaker.objects.create(
        provider_id="local", state="open", retry_at=timezone.now(), latency_ms=1.0
    )
    ProviderHealth.objects.create(
        provider_id="local",
        config_version=1,
        healthy=False,
        latency_ms=1,
        checked_at=timezone.now(),
        checks=1,
    )
    pool = {"capacity": 4, "busy": 4, "started": 9, "failed": 1, "restarts": 2, "creation_ms": 9.0}
    host = {"load1": 9.0, "processors": 2, "memory_bytes": 100, "memory_free_bytes": 5}
    disk = {"disk_bytes": 100, "disk_free_bytes": 5}
    figures = {"host": host | disk, "pools": {"local": pool | {"runtime": "gvisor"}}}
    Process.objects.create(instance="h", kind="web", pid=1, figures=figures)
    now = timezone.now()
    for rule in ("rate_limit_near", "forbidden_calls"):
        Alert.objects.create(
            rule=rule, active_key=rule, severity="warning", opened_at=now, seen_at=now
        )
    AuditExport.objects.create(destination="syslog h:1")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


Ask = Callable[[str], list[Any]]


@pytest.fixture
def ask(tmp_path: Path, live_server: Any, settings: Any) -> Iterator[Ask]:
    """A Prometheus that scrapes the live server, with our rules, and answers queries."""
    settings.METRICS_TOKEN = TOKEN
    job = {
        "job_name": "cofferdam",
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "authorization": {"credentials": TOKEN},
        "honor_labels": True,
        "static_configs": [{"targets": [live_server.url.removeprefix("http://")]}],
    }
    config = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [job],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            require("prometheus"),
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )

    def query(expression: str) -> list[Any]:
        text = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{text}") as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        result: list[Any] = found["data"]["result"]
        return result

    yield query
    process.terminate()
    process.wait(60)


def until(condition: Callable[[], Any], told: Callable[[], Any] = str, seconds: float = 90) -> None:
    """Wait for it: one scrape that a busy machine lets time out makes every gauge stale."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except OSError:
            # It is not there yet.
            assert time.monotonic() < deadline
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


# The figures on PostgreSQL are test_metrics.py's.
@pytest.mark.only_on("sqlite")
@pytest.mark.django_db(transaction=True)
def test_every_query_of_the_dashboard_and_every_rule_finds_something(
    alice: Caller, ask: Ask
) -> None:
    everything(alice)

    def empty() -> list[str]:
        return [expression for expression in queries() if not ask(expression)]

    until(lambda: ask("count_over_time(cofferdam_processes[1m]) > 2"))
    until(lambda: not empty(), empty)
    # A part of what is there: these look further back, or at what is not there.
    quiet = {"CofferdamCostSpike", "CofferdamNotScraped", "CofferdamErrorRate"}
    quiet |= {"CofferdamAverageTime", "CofferdamSlowExecutions"}

    def silent() -> set[str]:
        return {rule["alert"] for rule in rules() if not ask(rule["expr"])}

    until(lambda: silent() == quiet, silent)

    named = {
        name for text in (*queries(), *(r["expr"] for r in rules())) for name in NAME.findall(text)
    }

    def unknown() -> set[str]:
        known = {sample["metric"]["__name__"] for sample in ask('{__name__=~"cofferdam_.+"}')}
        return named - known - {"cofferdam_execution_duration_seconds_bucket"}

    until(lambda: not unknown(), unknown)

    # The rest of the rules needs something to happen.
    for _ in range(25):
        ended(alice, "error", error_code="SB003", retryable=True, total_ms=60_000.0)
    for name in ("CofferdamErrorRate", "CofferdamAverageTime", "CofferdamSlowExecutions"):
        (expression,) = [rule["expr"] for rule in rules() if rule["alert"] == name]
        until(partial(ask, expression))

"""The examples do what their pages say, through the real API."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from executions.runs.models import Execution
from executions.tenants.keys import create_api_key
from executions.tenants.models import Tenant
from tests.conftest import require
from tests.support.processes import ROOT
from tests.support.running import LOCAL, activate

EXAMPLES = ROOT / "examples"


@pytest.mark.django_db(transaction=True)
def test_the_weather_is_summarised_and_the_chart_comes_back(
    live_server: object, tmp_path: Path
) -> None:
    for program in ("bwrap", "curl"):
        require(program)
    activate("local", LOCAL)
    tenant = Tenant.objects.create(slug="wonderland", name="Wonderland")
    _, key_text = create_api_key(tenant, "example")
    done = subprocess.run(
        [EXAMPLES / "weather/run.sh"],
        env=os.environ | {"API_KEY": key_text, "URL": str(live_server), "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["status"] == "succeeded"
    assert answer["stdout"] == "365 days read from seattle-weather.csv\n"

    with (EXAMPLES / "weather/seattle-weather.csv").open() as file:
        december = [row for row in csv.DictReader(file) if row["date"].startswith("2015/12/")]
    rain = round(sum(float(row["precipitation"]) for row in december), 1)
    assert answer["result"]["wettest_month"] == 12
    assert answer["result"]["months"][11]["rain_mm"] == rain
    with (tmp_path / "summary.csv").open() as file:
        assert [row["month"] for row in csv.DictReader(file)] == [str(n) for n in range(1, 13)]
    chart = ElementTree.parse(tmp_path / "rain.svg").getroot()
    assert len(chart.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 12
    assert Execution.objects.get().artifacts.count() == 2


def test_the_benchmark_measures_the_service_beside_its_peers(tmp_path: Path) -> None:
    require("bwrap")
    target = tmp_path / "bench.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.executions"),
            *("--calls", "8", "--callers", "1", "8", "--soak", "8", "--idle", "0"),
            *("--json", str(target)),
        ],
        cwd=EXAMPLES.parent,
        check=True,
        capture_output=True,
        timeout=400,
    )
    kept = json.loads(target.read_text())
    rows = {(row["name"].split()[0], row["callers"]): row for row in kept["rows"]}
    assert {("POST", 1), ("POST", 8), ("bwrap", 8)} <= set(rows)
    for row in rows.values():
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["calls"] == (2 if row["paused"] else 8)
    # A difference of two medians, which a busy machine may turn round.
    assert -100 < kept["ledger_share_percent"] < 100
    assert kept["soak"]["memory_after_bytes"] > 0
    assert kept["processor_ms"]["run"] > kept["processor_ms"]["web"] > 0
    assert kept["idle"]["processes"] > 0
    assert kept["idle"]["pss_mib"] > 0

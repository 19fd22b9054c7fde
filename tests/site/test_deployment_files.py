"""deploy/ names what there is: settings, secrets, times and places fit each other and the service."""

from __future__ import annotations

import json
import math
import re
import subprocess
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from providers import draining
from sandbox_site import gunicorn_conf
from tests.conftest import require
from tests.support.processes import ROOT

DEPLOY = ROOT / "deploy"
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
# The images' own.
OF_OTHERS = {"POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD_FILE"}
# Of the storage, which has a page of its own settings.
STORAGE = {"STORAGE_URL", "STORAGE_ACCESS_KEY", "STORAGE_SECRET_KEY"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return read


def test_the_compose_file_is_what_the_specification_says(compose: dict[str, Any]) -> None:
    """The schema is compose-spec's own, schema/compose-spec.json of its repository (Apache-2.0)."""
    schema = json.loads((ROOT / "tests/data/compose/compose-spec.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(compose)] == []


def test_the_pool_alone_has_the_engines_socket(compose: dict[str, Any]) -> None:
    with_socket = {
        name
        for name, service in compose["services"].items()
        if "docker.sock" in json.dumps([service.get("volumes"), service.get("environment")])
    }
    assert with_socket == {"pool"}
    pool = compose["services"]["pool"]
    assert pool["secrets"] == ["pool_token"]
    assert pool["networks"] == ["pool"]
    assert "ports" not in pool
    assert [name for name, service in compose["services"].items() if "ports" in service] == [
        "proxy"
    ]


def test_our_services_are_closed_in(compose: dict[str, Any]) -> None:
    for name in ("setup", "web", "worker", "pool"):
        service = compose["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "user" not in service  # the image's, which is not root
    assert compose["services"]["pool"]["image"] == "${POOL_IMAGE:-cofferdam/pool}"
    stages = re.split(r"\n(?=FROM )", (DEPLOY / "Containerfile").read_text())
    images = [stage for stage in stages if "\nENTRYPOINT " in stage]
    assert [stage.splitlines()[0] for stage in images] == ["FROM ${BASE} AS pool", "FROM ${BASE}"]
    assert all("\nUSER 10001:10001\n" in stage for stage in images)
    installing = [stage for stage in stages if "pip install" in stage]
    assert len(installing) == 2
    assert all("--require-hashes" in stage for stage in installing)


def test_only_what_the_service_runs_reaches_a_layer() -> None:
    copied = set(
        re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Containerfile").read_text(), re.M)
    )
    copied = {name for names in copied for name in names.split()}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == {
        name.rstrip("*") for name in copied
    }


def test_no_health_check_is_one_that_compose_cannot_wait_for(compose: dict[str, Any]) -> None:
    """`up --wait` of some versions fails at a check that is disabled, and counts one left out as passed."""
    checks = {name: service.get("healthcheck") for name, service in compose["services"].items()}
    assert all(check is None or check.get("test") for check in checks.values())
    for service in compose["services"].values():
        for other, needed in service.get("depends_on", {}).items():
            assert needed["condition"] != "service_healthy" or checks[other], other


def test_every_setting_is_one_that_there_is(compose: dict[str, Any]) -> None:
    named = {
        name for service in compose["services"].values() for name in service.get("environment", {})
    }
    named |= set(re.findall(r"^([A-Z_]+)=", (DEPLOY / "cofferdam.env").read_text(), re.M))
    named = {name.removesuffix("_FILE") for name in named - OF_OTHERS} - STORAGE
    assert len(named) > 15
    for name in named:
        assert f"`{name}`" in SETTINGS, name


def test_every_secret_is_made_and_read_by_its_group_alone(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    require("openssl")
    folder = tmp_path / "secrets"
    for _ in range(2):
        subprocess.run([DEPLOY / "make-secrets", folder, "0"], check=True)
        made = {path.name: path.read_bytes() for path in folder.iterdir()}
    subprocess.run([DEPLOY / "make-secrets", folder, "0"], check=True)
    # What is there stays.
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made
    wanted = {Path(secret["file"]).name for secret in compose["secrets"].values()}
    assert wanted <= made.keys()
    assert all(len(content) > 40 for content in made.values())
    for name in ("secret_key", "fernet_keys", "ledger_keys", "database_url", "tls.key"):
        assert (folder / name).stat().st_mode & 0o777 == 0o440
    assert folder.stat().st_mode & 0o777 == 0o750
    used = {
        secret if isinstance(secret, str) else secret["source"]
        for service in compose["services"].values()
        for secret in service.get("secrets", [])
    }
    assert used == set(compose["secrets"])


def _seconds(text: str) -> int:
    amount, unit = re.fullmatch(r"(\d+)(ms|s|m)", text).groups()  # type: ignore[union-attr]
    return int(amount) * {"s": 1, "m": 60}[unit]


def test_nothing_is_killed_before_its_time(compose: dict[str, Any]) -> None:
    end = math.ceil(draining.ENDING_SECONDS) + gunicorn_conf.EXIT_SECONDS
    for name in ("web", "worker", "pool"):
        service = compose["services"][name]
        given = service["environment"]
        delay = int(given.get("SHUTDOWN_DELAY_SECONDS", 0))
        needed = delay + int(given["SHUTDOWN_GRACE_SECONDS"]) + end
        assert _seconds(service["stop_grace_period"]) > needed, name
    settings = dict(
        line.split("=", 1)
        for line in (DEPLOY / "cofferdam.env").read_text().splitlines()
        if line.startswith("SHUTDOWN")
    )
    needed = sum(map(int, settings.values())) + end
    for unit in ("web", "worker", "pool"):
        text = (DEPLOY / f"systemd/cofferdam-{unit}.service").read_text()
        assert int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)[1]) > needed  # type: ignore[index]


def test_the_proxy_waits_longer_than_any_answer_and_is_the_one_that_is_trusted(
    compose: dict[str, Any],
) -> None:
    from django.conf import settings

    proxy = (DEPLOY / "nginx/cofferdam.conf").read_text()
    read = int(re.search(r"proxy_read_timeout (\d+)s;", proxy)[1])  # type: ignore[index]
    # The longest wait for a sandbox, the longest start, the longest run.
    assert read > 300 + 120 + settings.SANDBOX_MAX_TIMEOUT_SEC
    assert "non_idempotent" not in re.sub(r"#.*", "", proxy)
    # A form is refused whose origin has a port that the Host does not have.
    assert set(re.findall(r"proxy_set_header Host (\S+);", proxy)) == {"$http_host"}
    size = int(re.search(r"client_max_body_size (\d+)m;", proxy)[1])  # type: ignore[index]
    assert size * 2**20 > settings.SANDBOX_MAX_BODY_BYTES
    for path in (DEPLOY / "nginx").glob("upstream-*.conf"):
        kept = int(re.search(r"keepalive_timeout (\d+)s;", path.read_text())[1])  # type: ignore[index]
        assert kept < gunicorn_conf.keepalive
    address = compose["services"]["proxy"]["networks"]["edge"]["ipv4_address"]
    for name in ("web", "worker", "setup"):
        assert compose["services"][name]["environment"]["TRUSTED_PROXIES"] == address


def test_no_container_can_take_the_address_that_is_trusted(compose: dict[str, Any]) -> None:
    (pool,) = compose["networks"]["edge"]["ipam"]["config"]
    subnet, given_out = IPv4Network(pool["subnet"]), IPv4Network(pool["ip_range"])
    assert given_out.subnet_of(subnet)
    fixed = {
        name: IPv4Address(service["networks"]["edge"]["ipv4_address"])
        for name, service in compose["services"].items()
        if isinstance(service["networks"], dict)
    }
    # The proxy looks web's name up once, at its start.
    assert fixed.keys() == {"web", "proxy"}
    assert len(set(fixed.values())) == len(fixed)
    for address in fixed.values():
        assert address in subnet
        assert address not in given_out
        # The first one is the bridge's.
        assert address != next(subnet.hosts())


def test_only_the_network_of_the_proxy_has_a_way_out(compose: dict[str, Any]) -> None:
    networks = compose["networks"]
    assert {name for name, network in networks.items() if not network.get("internal")} == {"edge"}
    members = {
        network: {
            name for name, service in compose["services"].items() if network in service["networks"]
        }
        for network in networks
    }
    assert members == {
        "edge": {"web", "worker", "proxy"},
        "data": {"setup", "web", "worker", "postgres", "redis", "storage", "bucket"},
        "pool": {"setup", "web", "worker", "pool"},
    }


def _exposure(*units: Path) -> float:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", *units],
        capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
    )  # fmt: skip
    return float(re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)[1])  # type: ignore[index]


def test_what_the_units_leave_open_is_what_the_page_says(tmp_path: Path) -> None:
    require("systemd-analyze")
    page = (ROOT / "docs/deployment/single-host.md").read_text()
    rated = {
        name: _exposure(DEPLOY / f"systemd/cofferdam-{name}.service")
        for name in ("pool", "web", "worker")
    }
    unit = (DEPLOY / "systemd/cofferdam-pool.service").read_text()
    docker = (DEPLOY / "systemd/pool-docker.conf").read_text().partition("[Service]\n")[2]
    with_docker = tmp_path / "cofferdam-pool.service"
    with_docker.write_text(unit.replace("\n[Install]", f"\n{docker}\n[Install]"))
    assert rated["web"] == rated["worker"] == _exposure(with_docker) <= 2.0
    said = (
        f"rates web and worker {rated['web']} of 10 (less is better), the pool {rated['pool']}, "
        f"and the pool with `pool-docker.conf` {rated['web']}."
    )
    assert said in " ".join(page.split())

"""Codex's own forwarder, unmodified, between an agent of the vendor's side and a session of ours.

The agent is Codex too, with a scripted model: both speak their own protocol, and encrypt it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.doors.codex.test_codex_protocol import last_record
from tests.support.codex_door import capability_path, make_key
from tests.support.codex_model import scripted
from tests.support.codex_program import CODEX, environment_of, require_codex, run_codex
from tests.support.codex_relay import AGENT_KEY, ENVIRONMENT, FORWARDER_KEY, VendorSide, vendor_side
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site
from tests.support.waiting import wait_until


@pytest.fixture
def vendor() -> Iterator[VendorSide]:
    require_codex()
    with vendor_side() as made:
        yield made


@contextmanager
def forwarding(vendor: VendorSide, folder: Path, site: Site, path: str) -> Iterator[Path]:
    """The forwarder before a session of the path; what it says is in the file."""
    home, said = folder / "forwarder", folder / "said"
    home.mkdir()
    url = f"ws://127.0.0.1:{site.service.port}{path}"
    command = [str(CODEX), "exec-server", "forward", "--connect", url, "--remote", vendor.url]
    environment = environment_of(home, CODEX_API_KEY=FORWARDER_KEY, RUST_LOG="debug")
    with (
        said.open("wb") as output,
        subprocess.Popen(
            [*command, "--environment-id", ENVIRONMENT],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as running,
    ):
        try:
            assert vendor.has_forwarder.wait(60), said.read_text()
            yield said
        finally:
            running.kill()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The agent's own folder."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "home"


def agent_variables(vendor: VendorSide) -> dict[str, str]:
    """By which the agent knows its environment from the vendor's side alone."""
    return {
        "CODEX_EXEC_SERVER_NOISE_REGISTRY_URL": vendor.url,
        "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID": ENVIRONMENT,
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN": AGENT_KEY,
    }


def folder_query(home: Path) -> str:
    return f"?folder={home.parent / 'work'}"


def test_a_command_of_the_agent_runs_in_a_session(
    streaming_site: Site, vendor: VendorSide, home: Path
) -> None:
    path = capability_path(streaming_site)
    script = "echo $((6 * 7)) | tee answer; pwd; cat /proc/net/dev | wc -l; exit 3"
    with (
        forwarding(vendor, home.parent, streaming_site, path + folder_query(home)) as said,
        scripted(script, "cat answer") as model,
    ):
        run_codex(home, model, **agent_variables(vendor))
    first, second = model.outputs
    assert "42\n/workspace\n3" in first
    assert "exited with code 3" in first
    assert "42" in second
    record = last_record(streaming_site)
    assert (record["code"], record["request_id"]) == ("cat answer", "call_1")
    assert len(str(record["conversation"])) == 36
    # The vendor's side and the log of the forwarder have neither the token nor what is said.
    asked = " ".join(str(each) for each in vendor.asked)
    token = path.rpartition("/")[2]
    for text in (token, script, "process/start"):
        assert text.encode() not in vendor.heard
        assert text not in asked
    assert token not in said.read_text()
    assert [name for name, _, _ in vendor.asked][:3] == ["register", "connect", "validate"]


def test_an_agent_that_the_vendor_does_not_admit_reaches_nothing(
    streaming_site: Site, vendor: VendorSide, home: Path
) -> None:
    vendor.is_refusing = True
    key = make_key(streaming_site, "forwarded", "refused")
    path = capability_path(streaming_site, "forwarded", "refused") + folder_query(home)
    with forwarding(vendor, home.parent, streaming_site, path), scripted("echo never") as model:
        run_codex(home, model, **agent_variables(vendor))
    assert "No usable execution environment" in model.outputs[0]
    assert ask(streaming_site.service, "GET", "/api/v1/sessions", key=key).json["results"] == []


def test_an_invalid_token_gives_the_agent_no_environment(
    streaming_site: Site, vendor: VendorSide, home: Path
) -> None:
    path = f"/codex/1x{'0' * 64}{folder_query(home)}"
    with forwarding(vendor, home.parent, streaming_site, path), scripted("echo never") as model:
        run_codex(home, model, **agent_variables(vendor))
    assert "No usable execution environment" in model.outputs[0]


def test_a_broken_relay_loses_no_output(
    streaming_site: Site, vendor: VendorSide, home: Path
) -> None:
    # What the agent has is encrypted: that it has the first output is seen by its size.
    size = 300_000
    script = f"yes | head -c {size}; until test -e go; do sleep 0.1; done; echo ended"
    call = ("exec_command", {"cmd": script, "yield_time_ms": 30_000})
    key = make_key(streaming_site, "forwarded", "cut")
    path = capability_path(streaming_site, "forwarded", "cut") + folder_query(home)
    with (
        forwarding(vendor, home.parent, streaming_site, path),
        ThreadPoolExecutor(1) as threads,
        scripted(call) as model,
    ):
        running = threads.submit(run_codex, home, model, **agent_variables(vendor))
        wait_until(lambda: len(vendor.heard) > size, 60)
        vendor.cut()
        wait_until(lambda: vendor.connections["agent"] > 1, 60)
        query = f"{EXECUTIONS}?limit=1"
        (found,) = ask(streaming_site.service, "GET", query, key=key).json["results"]
        url = f"{streaming_site.service.url}/api/v1/sessions/{found['session']}"
        put = httpx.put(f"{url}/files/content?path=go", content=b"", headers={"X-API-Key": key})
        assert put.status_code < 300
        running.result(120)
    assert "y\nended\n" in model.outputs[0]

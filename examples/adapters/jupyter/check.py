"""Cells of an unmodified JupyterLab, and of Jupyter's own client, run in a session."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cofferdam_jupyter
import pytest
from cofferdam import Cofferdam, ServiceError
from jupyter_client.manager import KernelManager, start_new_kernel

HERE = Path(__file__).parent
SECONDS = 300


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The package, built from a copy: nothing is left beside its source."""
    copy = tmp_path_factory.mktemp("package") / "jupyter"
    shutil.copytree(HERE, copy)
    pip = (sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    alone = ("--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall")
    subprocess.run([*pip, *alone, str(copy)], check=True)


@pytest.fixture
def kernel() -> Iterator[tuple[KernelManager, Any]]:
    manager, client = start_new_kernel(kernel_name="cofferdam", startup_timeout=SECONDS)
    yield manager, client
    client.stop_channels()
    if manager.is_alive():
        manager.shutdown_kernel()


def ran(client: Any, code: str) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """The reply to a cell, and what was told of it."""
    told: list[tuple[str, Any]] = []

    def note(message: dict[str, Any]) -> None:
        told.append((message["msg_type"], message["content"]))

    reply = client.execute_interactive(code, output_hook=note, timeout=SECONDS)
    return reply["content"], told


def printed(told: list[tuple[str, Any]], name: str = "stdout") -> str:
    return "".join(
        content["text"] for kind, content in told if kind == "stream" and content["name"] == name
    )


def test_cells_share_a_session_and_are_recorded(kernel: Any) -> None:
    _, client = kernel
    assert ran(client, "x = 6")[0]["status"] == "ok"
    reply, told = ran(client, "import sys\nprint('said')\nprint('why', file=sys.stderr)\nx * 7")
    assert (printed(told), printed(told, "stderr")) == ("said\n", "why\n")
    assert [c["data"]["text/plain"] for kind, c in told if kind == "display_data"] == ["42"]
    assert reply["status"] == "ok"
    with Cofferdam() as cofferdam:
        newest = cofferdam.execution(next(cofferdam.executions()).id)
        assert (newest.agent, newest.session is not None) == ("jupyter", True)
        assert newest.receipt


def test_rich_outputs_and_errors_are_told_as_jupyter_has_them(kernel: Any) -> None:
    _, client = kernel
    rich = "class Rich:\n    def _repr_html_(self): return '<b>bold</b>'\ndisplay(Rich())"
    _, told = ran(client, rich)
    assert [c["data"]["text/html"] for kind, c in told if kind == "display_data"] == ["<b>bold</b>"]
    reply, told = ran(client, "{}['there']")
    assert (reply["status"], reply["ename"], reply["evalue"]) == ("error", "KeyError", "'there'")
    assert "Traceback" in printed(told, "stderr")
    assert [kind for kind, _ in told if kind == "error"]


def test_an_interrupt_ends_the_cell_and_keeps_the_state(kernel: Any) -> None:
    manager, client = kernel
    ran(client, "x = 'kept'")
    told: list[str] = []

    def note(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream" and "waits" in message["content"]["text"]:
            manager.interrupt_kernel()
        told.append(message["msg_type"])

    code = "import time\nprint('waits', flush=True)\ntime.sleep(25)"
    reply = client.execute_interactive(code, output_hook=note, timeout=SECONDS)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert printed(ran(client, "print(x)")[1]) == "kept\n"


def test_a_cell_may_be_for_the_shell_or_in_another_language(kernel: Any) -> None:
    manager, client = kernel
    ran(client, "open('f', 'w').write('written')")
    assert printed(ran(client, "!cat f\n!echo ' and read'")[1]) == "written and read\n"
    assert printed(ran(client, "%%bash\nfor n in 1 2; do echo $n; done")[1]) == "1\n2\n"
    assert printed(ran(client, "%%js\nconsole.log(6 * 7)")[1]) == "42\n"
    reply, _ = ran(client, "!no-such-program")
    assert (reply["status"], reply["ename"], reply["evalue"]) == ("error", "Exit", "code 127")

    def note(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream" and "waits" in message["content"]["text"]:
            manager.interrupt_kernel()

    waits = "!echo waits; sleep 25"
    reply = client.execute_interactive(waits, output_hook=note, timeout=SECONDS)["content"]
    assert reply["status"] == "error"
    assert printed(ran(client, "print(open('f').read())")[1]) == "written\n"


def test_a_restart_forgets_names_and_keeps_files_and_the_end_closes_the_session(
    kernel: Any,
) -> None:
    manager, client = kernel
    ran(client, "x = 1\nopen('kept.txt', 'w').write('here')")
    manager.restart_kernel()
    client.wait_for_ready(timeout=SECONDS)
    assert ran(client, "x")[0]["ename"] == "NameError"
    assert printed(ran(client, "print(open('kept.txt').read())")[1]) == "here\n"
    with Cofferdam() as cofferdam:
        session = next(cofferdam.sessions())
        assert session.info.state == "open"
        manager.shutdown_kernel()
        assert session.refresh().state == "closed"


def test_a_notebook_in_use_outlives_the_time_that_it_may_be_idle(kernel: Any) -> None:
    with Cofferdam() as cofferdam:
        info = next(cofferdam.sessions()).info
        assert info.max_seconds > info.idle_seconds == cofferdam_jupyter.IDLE_SECONDS


def test_who_asks_for_longer_than_the_service_allows_is_given_what_it_does() -> None:
    with Cofferdam() as cofferdam:
        session = cofferdam_jupyter.open_for_long(cofferdam, 10**9)
        assert session.info.max_seconds == 86_400
        session.close()
        with pytest.raises(ServiceError):
            cofferdam_jupyter.open_for_long(cofferdam, 0)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """JupyterLab as it is installed, with a notebook for our kernel."""
    cells = [
        "import sys\nprint('in the session', sys.platform)",
        "display({'text/html'})\n6 * 7",
        "1 / 0",
    ]
    notebook = {
        "cells": [
            {"cell_type": "code", "id": f"c{n}", "source": each, "metadata": {}, "outputs": [],
             "execution_count": None}
            for n, each in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "cofferdam", "display_name": "Python in Cofferdam"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }  # fmt: skip
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (folder / "ours.ipynb").write_text(json.dumps(notebook))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}")
    quiet = ("--IdentityProvider.token=", "--ServerApp.open_browser=False")
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    process = subprocess.Popen(
        [sys.executable, *words, *quiet], cwd=folder, env={**os.environ, **own}
    )
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/api/status", timeout=SECONDS).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
    yield url
    process.terminate()
    process.wait(SECONDS)


def test_a_notebook_in_jupyterlab_runs_in_a_session(lab: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "chromium is needed"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(SECONDS * 1000)
        expect.set_options(timeout=SECONDS * 1000)
        page.goto(f"{lab}/lab/tree/ours.ipynb")
        page.get_by_text("in the session", exact=False).first.wait_for()
        # Before it has a kernel it runs nothing, and says nothing of that.
        page.get_by_role("button", name="Python in Cofferdam | Idle").wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        outputs = page.locator(".jp-OutputArea-output")
        expect(outputs.filter(has_text="in the session linux")).to_be_visible()
        expect(outputs.filter(has_text="42")).to_be_visible()
        expect(outputs.filter(has_text="ZeroDivisionError: division by zero").first).to_be_visible()
        if shown := os.environ.get("SCREENSHOT"):
            page.screenshot(path=shown)
        browser.close()

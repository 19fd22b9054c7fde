"""Of two instances behind a proxy one is restarted, then the other ends, and no call is lost."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support.processes import free_port
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Prepared, Site, prepare, serving

NGINX = """
daemon off;
worker_processes 2;
pid {folder}/pid;
error_log {folder}/errors;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream instances {{
        server 127.0.0.1:{first} max_fails=0;
        server 127.0.0.1:{second} max_fails=0;
        keepalive 16;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://instances;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
        }}
    }}
}}
"""


class Load:
    """Callers that call again and again, each over a connection that he keeps."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: Counter[str] = Counter()

    def start(self, count: int, seconds: float) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._call, args=(seconds,))
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for_more(self, count: int) -> None:
        """Until so many more calls were answered."""
        deadline = time.monotonic() + 60
        wanted = self.answers.total() + count
        while self.answers.total() < wanted:
            assert time.monotonic() < deadline, self.answers
            time.sleep(0.05)

    def _call(self, seconds: float) -> None:
        body = json.dumps({"code": f"import time; time.sleep({seconds}); print('ran')"})
        headers = {"X-API-Key": self._key, "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stopped.is_set():
            try:
                connection.request("POST", EXECUTIONS, body, headers)
                answer = connection.getresponse()
                text = answer.read().decode(errors="replace")
                told = (
                    "ran" if answer.status == 200 and "ran" in json.loads(text)["stdout"] else text
                )
                self.answers[f"{answer.status} {told[:300]}"] += 1
            except (OSError, http.client.HTTPException) as error:
                self.answers[repr(error)] += 1
                connection.close()


@contextmanager
def proxy(folder: Path, first: int, second: int) -> Iterator[int]:
    """nginx over two instances, with connections that it keeps; its port."""
    path = require("nginx")
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=port, first=first, second=second))
    process = subprocess.Popen([path, "-p", str(folder), "-c", str(config)])
    try:
        deadline = time.monotonic() + 60
        while not _is_listening(port):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def instance(prepared: Prepared, port: int, log: Path) -> Iterator[Site]:
    """A web server of two processes, over the same listener."""
    command = [
        *(sys.executable, "-m", "gunicorn", "--config", "python:sandbox_site.gunicorn_conf"),
        *("--bind", f"127.0.0.1:{port}", "sandbox_site.asgi:application"),
    ]
    environment = {"PORT": str(port), "WEB_CONCURRENCY": "2", "SANDBOX_MAX_RUNNING": "100"}
    with serving(prepared, log, command, **environment) as site:
        yield site


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    require("bwrap")
    return prepare(tmp_path_factory.mktemp("rolling") / "data")


def test_no_call_is_lost(prepared: Prepared, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        sites = [
            stack.enter_context(instance(prepared, port, tmp_path / f"log-{port}"))
            for port in ports
        ]
        port = stack.enter_context(proxy(tmp_path, *ports))
        load = Load(port, prepared.alice)
        stack.callback(load.stop)
        load.start(4, 0)
        load.start(4, 2)
        for site in sites:
            load.wait_for_more(10)
            site.service.process.send_signal(signal.SIGTERM)
            code, _ = site.service.wait_for_end()
            assert code == 0, site.service.output
            load.wait_for_more(10)
            if site is sites[0]:
                again = stack.enter_context(instance(prepared, ports[0], tmp_path / "again"))
                assert ask(again.service, "GET", "/readyz").status == 200
        load.stop()
    assert set(load.answers) == {"200 ran"}, (load.answers, (tmp_path / "errors").read_text())

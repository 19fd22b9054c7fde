"""What the access log says of addresses that are a proof of themselves."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from gunicorn.config import Config

from sandbox_site.gunicorn_conf import Logger


@pytest.mark.parametrize(
    "path",
    [
        "/codex/1xabc",
        "/codex/1xabc?folder=/a",
        "/%63odex/1xabc",
        "/%2563odex/1xabc",
        "//codex/1xabc",
        "/CODEX/1xabc",
        "/a/../codex/1xabc",
    ],
)
def test_a_capability_is_not_logged(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gunicorn.access")
    written = _log(path)
    assert "1xabc" not in written + caplog.text
    assert "/codex/..." in written + caplog.text


def test_other_paths_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gunicorn.access")
    assert "/api/v1/usage" in _log("/api/v1/usage") + caplog.text


def _log(path: str) -> str:
    config = Config()
    config.set("accesslog", "-")
    logger = Logger(config)
    written: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        written.append(record.getMessage())
        return True

    logger.access_log.addFilter(keep)
    environ: dict[str, Any] = {
        "REQUEST_METHOD": "GET",
        "RAW_URI": path,
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_REFERER": f"http://a{path}",
    }
    answer = SimpleNamespace(status="426", headers=[], sent=0)
    request = SimpleNamespace(headers=[])
    try:
        logger.access(answer, request, environ, timedelta(seconds=1))
    finally:
        logger.access_log.removeFilter(keep)
    return "\n".join(written)

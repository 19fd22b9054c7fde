"""What the processes of `manage.py up` are forked from: the code of the service, loaded once.

The web server, its worker, the cluster and its workers then share the memory of it. A process that
is started again has the code as it was loaded here. Where the web server and the workers are
started each by itself, each loads the code itself.
"""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from importlib import import_module

import django
from django.conf import settings
from django.db import DatabaseError, connections
from django.urls import get_resolver
from gunicorn.app.wsgiapp import WSGIApplication

from executions.kernel.own_process import show_as
from executions.kernel.postgresql import expect_answers_within
from providers import draining

# All that one of the processes loads by its first request or task. Not what starts threads, as
# `sandbox_site.asgi` does.
_MODULES = (
    "gunicorn.instrument.statsd",
    "sandbox_site.gunicorn_conf",
    "sandbox_site.wsgi",
    "sandbox_site.web.bridge",
    "sandbox_site.web.connections",
    "sandbox_site.management.commands.qcluster",
    "providers.local.provider",
)


def load(bind: str) -> WSGIApplication:
    """Load the apps, the views and the servers, and return the web server that listens on `bind`.

    Leaves no thread and no connection behind.
    """
    django.setup()
    for name in _MODULES:
        import_module(name)
    get_resolver().url_patterns  # noqa: B018  loads every view
    _query_once()
    server = _make_web_server(bind)
    # Collections in the processes leave these objects, and so their pages, alone.
    gc.collect()
    gc.freeze()
    return server


def _make_web_server(bind: str) -> WSGIApplication:
    kept, sys.argv = sys.argv, _arguments(bind)
    try:
        return WSGIApplication(prog="gunicorn")
    finally:
        sys.argv = kept


def _arguments(bind: str) -> list[str]:
    return [
        import_module("gunicorn.__main__").__file__ or "gunicorn",
        *("--config", "python:sandbox_site.gunicorn_conf"),
        *("--bind", bind),
        "sandbox_site.asgi:application",
    ]


def _query_once() -> None:
    """Have Django build what it builds for a first query, 4 MiB, which the processes then share.

    A database that is away is for them to tell.
    """
    from executions.runs.models import Process

    expect_answers_within(settings.DATABASE_WAIT_SECONDS)
    with suppress(DatabaseError):
        Process.objects.filter(ended_at=None).exists()
    connections.close_all()


def run_web_server(server: WSGIApplication, bind: str) -> None:
    """Be gunicorn. For a forked process."""
    _become("gunicorn")
    # With which it would start itself anew.
    sys.argv = _arguments(bind)
    server.run()


def run_cluster() -> None:
    """Be `manage.py qcluster`. For a forked process."""
    _become("qcluster")
    sys.argv = [sys.argv[0], "qcluster"]
    from sandbox_site.management.commands.qcluster import Command

    # What these check was checked before this process was forked.
    Command().run_from_argv([*sys.argv, "--skip-checks"])


def _become(name: str) -> None:
    show_as(name)
    draining.share_with_own_forks()

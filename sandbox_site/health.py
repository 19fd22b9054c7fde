"""GET /healthz: is this process alive? GET /readyz: may it be sent requests?"""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe

from executions.kernel.database import database_problem
from executions.runs.admission import disk_problem
from providers import draining
from sandbox_site import __version__


def database_answers() -> bool:
    return not database_problem()


def disk_has_room() -> bool:
    return not disk_problem()


# What this process cannot do without: the name that is told to strangers, and whether it is there.
NEEDED: dict[str, Callable[[], bool]] = {"database": database_answers, "disk": disk_has_room}


@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    """Answer 200 when the database answers, else 503; with the version, and nothing else."""
    if database_answers():
        return JsonResponse({"status": "ok", "database": "ok", "version": __version__})
    body = {"status": "unavailable", "database": "unavailable", "version": __version__}
    return JsonResponse(body, status=503)


@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """200 when requests are welcome, and 503 with the reasons when they are not.

    "draining" from the moment on when the process was told to stop.
    """
    if draining.is_draining():
        return JsonResponse({"status": "draining"}, status=503)
    missing = [name for name, is_there in NEEDED.items() if not is_there()]
    if missing:
        return JsonResponse({"status": "unavailable", "reasons": missing}, status=503)
    return JsonResponse({"status": "ready"})

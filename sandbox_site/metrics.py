"""GET /metrics: for Prometheus, and for nobody who may not."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from executions.capabilities.observability.metrics import CONTENT_TYPE, access_of, collect, write

_REFUSALS = {
    401: "A token is required: Authorization: Bearer with the value of METRICS_TOKEN.\n",
    403: "This address is not allowed. Set METRICS_TOKEN or METRICS_ALLOWED_ADDRESSES.\n",
}


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """The figures of the whole installation, whichever process answers. Asks nothing of the
    database for whoever is refused."""
    access = access_of(request.META)
    if access.refused:
        answer = HttpResponse(
            _REFUSALS[access.refused], status=access.refused, content_type="text/plain"
        )
        if access.refused == 401:
            answer["WWW-Authenticate"] = "Bearer"
    else:
        answer = HttpResponse(write(collect(with_tenants=access.with_tenants)))
        answer["Content-Type"] = CONTENT_TYPE
    answer["Cache-Control"] = "no-store"
    return answer

"""GET /api/schema: the API's description, built once in a process and sent from memory."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.cache import get_conditional_response
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiJsonRenderer, OpenApiYamlRenderer
from drf_spectacular.utils import extend_schema
from drf_spectacular.views import SpectacularAPIView
from rest_framework.request import Request

# Whoever has it asks after a minute whether it is still the same.
CACHE_CONTROL = "public, max-age=60"


@dataclass(frozen=True)
class Document:
    content: bytes
    etag: str


class Description:
    """The description in each format. It says the same to everybody, for as long as the process
    lives: it depends on the code and on the settings, and on nothing of a request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: dict[str, Document] = {}

    def document(self, media_format: str) -> Document:
        """In "yaml" or "json". The first caller builds both, and others wait for that."""
        if media_format not in self._documents:
            with self._lock:
                if not self._documents:
                    self._documents = _build()
        return self._documents[media_format]


def _build() -> dict[str, Document]:
    schema = SchemaGenerator().get_schema(public=True)  # type: ignore[no-untyped-call]
    contents = {
        renderer.format: renderer.render(schema, renderer_context={})
        for renderer in (OpenApiYamlRenderer(), OpenApiJsonRenderer())
    }
    return {
        name: Document(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
        for name, content in contents.items()
    }


description = Description()


class DescriptionView(SpectacularAPIView):
    """Negotiates the format as drf-spectacular does."""

    @extend_schema(exclude=True)
    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        renderer = request.accepted_renderer
        document = description.document(renderer.format)
        kind = request.accepted_media_type
        answer = HttpResponse(
            document.content,
            content_type=f"{kind}; charset={renderer.charset}" if renderer.charset else kind,
        )
        answer["Content-Disposition"] = f'inline; filename="Cofferdam.{renderer.format}"'
        answer["Cache-Control"] = CACHE_CONTROL
        answer["ETag"] = document.etag
        return get_conditional_response(request, document.etag, None, answer) or answer

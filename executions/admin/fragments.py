"""Parts of pages, for the script that keeps what is looked at up to date (refresh.js)."""

from __future__ import annotations

import hashlib
from typing import cast

from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.cache import get_conditional_response, patch_vary_headers

_HEADER = "X-Fragment"


def is_wanted(request: HttpRequest) -> bool:
    return _HEADER in request.headers


def fragment_of(request: HttpRequest, page: HttpResponse, template: str) -> HttpResponse:
    """The page, or by a template of its own the part that was asked for: 304 where the reader has
    it already. No part may draw what differs from answer to answer, as a CSRF token does.
    """
    if not is_wanted(request) or not isinstance(page, TemplateResponse):
        return page
    page.template_name = template
    page.render()
    etag = f'"{hashlib.sha256(page.content).hexdigest()}"'
    page["ETag"] = etag
    patch_vary_headers(page, (_HEADER,))
    return cast("HttpResponse", get_conditional_response(request, etag, None, page))

"""Setting up an authenticator of one's own: a second factor for whoever wants one."""

from __future__ import annotations

import base64
import io
from typing import cast

import qrcode
import qrcode.image.svg
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.contenttypes.models import ContentType
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django_otp import login as verify_session
from django_otp.plugins.otp_totp.models import TOTPDevice

NAME = "Authenticator"


@never_cache
@sensitive_post_parameters("code")
def authenticator(request: HttpRequest) -> HttpResponse:
    """Shows a code to scan until one of its numbers was entered; then lets it be removed.

    Removing asks for a number too, so that a session left open is not enough.
    """
    device = TOTPDevice.objects.filter(user_id=request.user.pk, confirmed=True).first()
    if request.method == "POST":
        return _change(request, device)
    waiting = None
    if device is None:
        waiting, _ = TOTPDevice.objects.get_or_create(
            user_id=request.user.pk, confirmed=False, defaults={"name": NAME}
        )
    context = {
        **admin.site.each_context(request),
        "title": "Authenticator",
        "device": device,
        "picture": _picture(waiting.config_url) if waiting else "",
        "secret": base64.b32encode(waiting.bin_key).decode() if waiting else "",
    }
    return TemplateResponse(request, "admin/authenticator.html", context)


def _change(request: HttpRequest, device: TOTPDevice | None) -> HttpResponse:
    back = HttpResponseRedirect(reverse("authenticator"))
    code = request.POST.get("code", "").replace(" ", "")
    with transaction.atomic():
        own = TOTPDevice.objects.select_for_update().filter(user_id=request.user.pk)
        asked = own.filter(confirmed=device is not None).first()
        right = asked is not None and asked.verify_is_allowed()[0] and asked.verify_token(code)
        if asked is None or not right:
            messages.error(request, "That is not the number it shows now. Wait for the next one.")
            return back
        if device is None:
            asked.confirmed = True
            asked.save(update_fields=["confirmed"])
            done = "The authenticator was set up."
        else:
            own.delete()
            done = "The authenticator was removed."
        _log(request, done)
    if device is None:
        verify_session(request, asked)
    messages.success(request, done)
    return back


def _log(request: HttpRequest, message: str) -> None:
    LogEntry.objects.create(
        user_id=cast("int", request.user.pk),
        content_type_id=ContentType.objects.get_for_model(get_user_model()).pk,
        object_id=str(request.user.pk),
        object_repr=request.user.get_username(),
        action_flag=CHANGE,
        change_message=message,
    )


def _picture(url: str) -> str:
    """The QR code as the address of an image that holds it."""
    drawn = io.BytesIO()
    qrcode.make(url, image_factory=qrcode.image.svg.SvgPathImage).save(drawn)
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()

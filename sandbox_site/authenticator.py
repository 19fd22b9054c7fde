"""Setting up an authenticator of one's own: a second factor for whoever wants one."""

from __future__ import annotations

import base64
import io
from typing import cast

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

from providers.services.row_changes import own_account
from sandbox_site import recovery
from sandbox_site.accounts import authenticator_of

NAME = "Authenticator"


@never_cache
@sensitive_post_parameters("code")
def authenticator(request: HttpRequest) -> HttpResponse:
    """Shows a code to scan until one of its numbers was entered; then lets it be removed.

    Removing, and new recovery codes, ask for a number too, or for a recovery code, so that a
    session left open is not enough.
    """
    with own_account():
        device = authenticator_of(request.user)
        if request.method == "POST":
            return _change(request, device)
        return _page(request, device)


def _page(
    request: HttpRequest, device: TOTPDevice | None, codes: list[str] | None = None
) -> HttpResponse:
    waiting = None
    if device is None:
        waiting, _ = TOTPDevice.objects.get_or_create(
            user_id=request.user.pk, confirmed=False, defaults={"name": NAME}
        )
    context = {
        **admin.site.each_context(request),
        "title": "Authenticator",
        "device": device,
        "codes": codes,
        "codes_left": recovery.codes_left(device) if device else 0,
        "picture": _picture(waiting.config_url) if waiting else "",
        "secret": base64.b32encode(waiting.bin_key).decode() if waiting else "",
    }
    return TemplateResponse(request, "admin/authenticator.html", context)


def _change(request: HttpRequest, device: TOTPDevice | None) -> HttpResponse:
    back = HttpResponseRedirect(reverse("authenticator"))
    code = request.POST.get("code", "")
    codes = None
    with transaction.atomic():
        own = TOTPDevice.objects.select_for_update().filter(user_id=request.user.pk)
        asked = own.filter(confirmed=device is not None).first()
        if asked is None or not _proves(request, asked, code):
            messages.error(request, "Wrong code. Wait for the next one.")
            return back
        if device is None:
            asked.confirmed = True
            asked.save(update_fields=["confirmed"])
            codes = recovery.issue_codes(asked)
            done = "The authenticator was set up."
        elif "new_codes" in request.POST:
            codes = recovery.issue_codes(asked)
            done = "New recovery codes were created."
        else:
            own.delete()
            done = "The authenticator was removed."
        _log(request, done)
    messages.success(request, done)
    if codes is None:
        return back
    verify_session(request, asked)
    # Answered directly: they are shown once, and a redirect would have to keep them somewhere.
    return _page(request, asked, codes)


def _proves(request: HttpRequest, device: TOTPDevice, code: str) -> bool:
    if device.confirmed and recovery.is_code(code):
        return recovery.use_code(request.user, code) is not None
    return bool(device.verify_is_allowed()[0] and device.verify_token(code.replace(" ", "")))


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
    # Few pages need it, and it loads an image library.
    import qrcode
    from qrcode.image.svg import SvgPathImage

    drawn = io.BytesIO()
    qrcode.make(url, image_factory=SvgPathImage).save(drawn)
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()

"""Signing in: name, password, and a code for whoever has set up an authenticator."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django import forms
from django.contrib import admin, messages
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.contrib.auth.signals import user_login_failed
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import Resolver404, resolve, reverse
from django_otp import devices_for_user, match_token
from unfold.forms import AuthenticationForm
from unfold.widgets import UnfoldAdminTextInputWidget

from providers.services.row_changes import own_account
from sandbox_site import recovery, strangers
from sandbox_site.accounts import was_altered_outside
from sandbox_site.client_address import address_of

# Where somebody's session can end between her opening a page and pressing its button. The others
# of the kind answer by going to the page they belong to.
_ONLY_POSTED = (
    *("executions_save_filter", "executions_remove_filter", "executions_cancel"),
    *("executions_session_close", "executions_session_reset", "executions_session_extend"),
    "providers_test",
)


class LoginForm(AuthenticationForm):  # type: ignore[misc]
    """Asks everybody for a code, so that nobody learns who has an authenticator."""

    otp_token = forms.CharField(
        label="Authenticator code",
        required=False,
        help_text="Or a recovery code. Leave empty without an authenticator.",
        widget=UnfoldAdminTextInputWidget(attrs={"autocomplete": "one-time-code"}),
    )

    def clean(self) -> dict[str, Any]:
        # To sign in may renew the hash of one's password, and counts a number as used.
        with own_account():
            return self._clean()

    def _clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean()
        user = self.get_user()
        if user is None:
            return cleaned
        if was_altered_outside(user):
            raise self._refused(cleaned)
        if next(devices_for_user(user), None) is None:
            return cleaned
        device = self._device(user, str(cleaned.get("otp_token") or ""))
        if device is None:
            raise self._refused(cleaned)
        # What django_otp reads when the user is logged in, to mark the session as verified.
        user.otp_device = device
        return cleaned

    def _refused(self, cleaned: dict[str, Any]) -> ValidationError:
        """Counted and told like a wrong password."""
        credentials = {"username": cleaned.get("username")}
        user_login_failed.send(LoginForm, credentials=credentials, request=self.request)
        self.user_cache = None
        error: ValidationError = self.get_invalid_login_error()
        return error

    def _device(self, user: Any, code: str) -> Any:
        if not recovery.is_code(code):
            code = code.replace(" ", "")
            return match_token(user, code) if code else None
        device = recovery.use_code(user, code)
        if device is not None and hasattr(self.request, "_messages"):
            left = f"A recovery code was used; {recovery.codes_left(device)} are left."
            messages.warning(self.request, left)
        return device


def login(request: HttpRequest) -> HttpResponse:
    """The login page, from which everybody gets to a page: a `next` that is none is forgotten."""
    if not _leads_to_a_page(request.GET.get(REDIRECT_FIELD_NAME, "")):
        request.GET = request.GET.copy()  # type: ignore[assignment]
        del request.GET[REDIRECT_FIELD_NAME]  # type: ignore[misc]
    if request.method != "POST":
        answer: HttpResponse = admin.site.login(request)
        return answer
    try:
        with strangers.passwords.taken(address_of(request) or ""):
            answer = admin.site.login(request)
    except strangers.TooMany as refusal:
        return strangers.too_many(request, refusal)
    return answer


def logout(request: HttpRequest) -> HttpResponse:
    """Signs out when it is asked to by POST; whoever only comes by gets to the first page."""
    if request.method != "POST":
        return HttpResponseRedirect(reverse("admin:index"))
    answer: HttpResponse = admin.site.logout(request)
    return answer


def own_password(request: HttpRequest) -> HttpResponse:
    """The page on which one changes one's own password, by knowing the old one."""
    with own_account():
        answer: HttpResponse = admin.site.password_change(request)
    return answer


def _leads_to_a_page(address: str) -> bool:
    """Not so for what the admin has no page for: its catch-all is the one address without name."""
    if not address:
        return True
    try:
        return resolve(urlsplit(address).path).url_name not in (None, *_ONLY_POSTED)
    except (Resolver404, ValueError):
        return False

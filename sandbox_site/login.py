"""Signing in: name, password, and a code for whoever has set up an authenticator."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.auth.signals import user_login_failed
from django_otp import devices_for_user, match_token
from unfold.forms import AuthenticationForm
from unfold.widgets import UnfoldAdminTextInputWidget


class LoginForm(AuthenticationForm):  # type: ignore[misc]
    """Asks everybody for a code, so that nobody learns who has an authenticator."""

    otp_token = forms.CharField(
        label="Authenticator code",
        required=False,
        help_text="Leave empty if you have not set up an authenticator.",
        widget=UnfoldAdminTextInputWidget(
            attrs={"autocomplete": "one-time-code", "inputmode": "numeric"}
        ),
    )

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean()
        user = self.get_user()
        if user is None or next(devices_for_user(user), None) is None:
            return cleaned
        code = str(cleaned.get("otp_token") or "").replace(" ", "")
        device = match_token(user, code) if code else None
        if device is None:
            # Counted like a wrong password.
            credentials = {"username": cleaned.get("username")}
            user_login_failed.send(LoginForm, credentials=credentials, request=self.request)
            self.user_cache = None
            raise self.get_invalid_login_error()
        # What django_otp reads when the user is logged in, to mark the session as verified.
        user.otp_device = device
        return cleaned

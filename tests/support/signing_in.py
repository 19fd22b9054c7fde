"""Signing in with a password and an authenticator."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django_otp.oath import TOTP
from django_otp.plugins.otp_totp.models import TOTPDevice

LOGIN = "/admin/login/"
PAGE = "/admin/authenticator/"
PASSWORD = "correct horse"


@pytest.fixture
def ann() -> User:
    return User.objects.create_superuser("ann", password=PASSWORD)


def attempt(
    client: Client, password: str = PASSWORD, name: str = "ann", code: str = "", **extra: Any
) -> int:
    body = {"username": name, "password": password, "otp_token": code}
    status: int = client.post(LOGIN, body, **extra).status_code
    return status


def code_of(device: TOTPDevice, steps: int = 0) -> str:
    totp = TOTP(device.bin_key, device.step, device.t0, device.digits, device.drift)
    totp.time = time.time() + steps * device.step
    return str(totp.token()).zfill(device.digits)


def with_authenticator(user: User) -> TOTPDevice:
    return TOTPDevice.objects.create(user=user, name="phone", confirmed=True)

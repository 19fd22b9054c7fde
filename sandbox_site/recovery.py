"""Recovery codes: the way in for whoever lost the authenticator, each good for once."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.ledger.append import append, is_altered
from sandbox_site.models import RecoveryCode

CODES = 10
_RANDOM_BYTES = 10
_LENGTH = 16
_GROUP = 4


@sensitive_variables()
def issue_codes(device: TOTPDevice) -> list[str]:
    """New codes for an authenticator, known only now; those it had before are worth nothing."""
    texts = [_new() for _ in range(CODES)]
    with transaction.atomic():
        RecoveryCode.objects.filter(device=device).delete()
        for text in texts:
            # One by one, because each is entered in the ledger: nobody else may add one.
            RecoveryCode.objects.create(device=device, digest=_digest(text))
        content = {"action": "recovery codes made", "codes": CODES}
        append("user", device.user.get_username(), content)
    return texts


@sensitive_variables()
def use_code(user: Any, text: str) -> TOTPDevice | None:
    """The user's authenticator that the code stands in for, None for a wrong or a used one."""
    own = RecoveryCode.objects.filter(
        device__user_id=user.pk, device__confirmed=True, digest=_digest(text), used_at=None
    )
    with transaction.atomic():
        code = own.select_related("device").first()
        if code is None or is_altered(RecoveryCode, code.pk):
            return None
        if not own.filter(pk=code.pk).update(used_at=timezone.now()):
            return None
        content = {"action": "recovery code used", "left": codes_left(code.device)}
        append("user", user.get_username(), content)
    return code.device


def codes_left(device: TOTPDevice) -> int:
    return RecoveryCode.objects.filter(device=device, used_at=None).count()


def is_code(text: str) -> bool:
    """Whether it has the form of a recovery code and not that of an authenticator's number."""
    return len(_plain(text)) == _LENGTH


def _new() -> str:
    text = base64.b32encode(secrets.token_bytes(_RANDOM_BYTES)).decode().lower()
    return "-".join(text[start : start + _GROUP] for start in range(0, _LENGTH, _GROUP))


def _plain(text: str) -> str:
    return "".join(text.split()).replace("-", "").lower()


def _digest(text: str) -> str:
    return hashlib.sha256(_plain(text).encode("utf-8", "surrogatepass")).hexdigest()

from __future__ import annotations

from django.db import models
from django.utils import timezone
from django_otp.plugins.otp_totp.models import TOTPDevice

from providers.fields import EncryptedTextField
from providers.models import AnnouncedQuerySet


class RecoveryCode(models.Model):
    """A code that stands in once for a number of an authenticator. Only its SHA-256 is stored.

    A code holds 80 random bits, so a plain hash cannot be reversed by guessing.
    """

    device = models.ForeignKey(TOTPDevice, on_delete=models.CASCADE, related_name="recovery_codes")
    digest = models.CharField(max_length=64, unique=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now)
    used_at = models.DateTimeField(null=True)

    objects: models.Manager[RecoveryCode] = AnnouncedQuerySet.as_manager()

    def __str__(self) -> str:
        return "used" if self.used_at else "unused"


class InstallationMark(models.Model):
    """What every instance of an installation must have in common, by the name of its setting.

    Made by the first instance and compared by each that starts: `sandbox_site.installation`. It is
    encrypted, so that whoever reads the database cannot try keys against it.
    """

    name = models.CharField(max_length=32, unique=True)
    mark = EncryptedTextField()
    made_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return self.name

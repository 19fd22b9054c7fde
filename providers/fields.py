"""Model fields whose values are encrypted before they reach the database."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import fernet_fields
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from fernet_fields.hkdf import derive_fernet_key

if TYPE_CHECKING:
    _EncryptedTextField = models.Field[Any, Any]
else:
    _EncryptedTextField = fernet_fields.EncryptedTextField

_DUMPED = "fernet:"


class DecryptionError(Exception):
    """A stored value was encrypted with a key that is no longer in FERNET_KEYS."""


@lru_cache(maxsize=8)
def _derived(keys: tuple[str | bytes, ...]) -> tuple[bytes, ...]:
    return tuple(derive_fernet_key(key) for key in keys)


class EncryptedTextField(_EncryptedTextField):
    """Text that only holders of FERNET_KEYS can read.

    Safe where the field it extends is not: `bulk_update` stores ciphertext, a lost key raises
    DecryptionError, a fixture holds ciphertext and loads again.
    """

    def encode(self, value: Any) -> str:
        """The text that is encrypted in place of `value`."""
        return str(value)

    def decode(self, text: str) -> Any:
        """The value that `encode` was given."""
        return text

    # Plain properties where the parent caches: a changed setting takes effect at once.
    @property
    def keys(self) -> tuple[str | bytes, ...]:
        if not (keys := getattr(settings, "FERNET_KEYS", None)):
            raise ImproperlyConfigured("FERNET_KEYS is not set; nothing falls back to SECRET_KEY.")
        return tuple(keys)

    @property
    def fernet_keys(self) -> tuple[str | bytes, ...]:
        return _derived(self.keys) if getattr(settings, "FERNET_USE_HKDF", True) else self.keys

    @property
    def fernet(self) -> MultiFernet:
        return MultiFernet([Fernet(key) for key in self.fernet_keys])

    def get_prep_value(self, value: Any) -> Any:
        if value is None or hasattr(value, "as_sql"):
            return value
        return self.encode(value)

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        # bulk_update hands over a CASE expression whose values come here again one by one;
        # encrypting the expression itself would store its repr.
        if hasattr(value, "as_sql"):
            return value
        return super().get_db_prep_save(value, connection)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return None if value is None else self._decrypt(bytes(value))

    def _decrypt(self, token: bytes) -> Any:
        try:
            text = self.fernet.decrypt(token).decode()
        except InvalidToken:
            raise DecryptionError(
                f"{self} cannot be decrypted: none of FERNET_KEYS is the key it was written with. "
                "Put the old key back into FERNET_KEYS, after the new one, or enter the value anew."
            ) from None
        return self.decode(text)

    def value_to_string(self, obj: models.Model) -> Any:
        """What `dumpdata` writes: ciphertext, which `loaddata` takes under the same keys."""
        token = self.fernet.encrypt(self.encode(self.value_from_object(obj)).encode())
        return _DUMPED + token.decode()

    def to_python(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith(_DUMPED):
            return self._decrypt(value.removeprefix(_DUMPED).encode())
        return value

    def clean(self, value: Any, model_instance: models.Model | None) -> Any:
        # Not through to_python: whoever can set a value could have a dumped one decrypted.
        self.validate(value, model_instance)
        self.run_validators(value)
        return value


class EncryptedJSONField(EncryptedTextField):
    """A JSON object that only holders of FERNET_KEYS can read."""

    empty_values = [None]

    def encode(self, value: Any) -> str:
        if not isinstance(value, dict):
            raise TypeError(f"{self} takes a JSON object, not {type(value).__name__}.")
        return json.dumps(value, allow_nan=False, separators=(",", ":"))

    def decode(self, text: str) -> Any:
        return json.loads(text)

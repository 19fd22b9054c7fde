"""Model fields whose values are encrypted before they reach the database."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import fernet_fields
from django.db import models

from providers import aes_gcm, key_ring, slices

if TYPE_CHECKING:
    _EncryptedTextField = models.Field[Any, Any]
else:
    _EncryptedTextField = fernet_fields.EncryptedTextField

_DUMPED = "aes256gcm:"

_RESTART = (
    "This process read them from its environment when it started: if a key was added since then, "
    "restart it. "
)


class DecryptionError(Exception):
    """A stored value was encrypted with a key that is no longer in FERNET_KEYS."""


class EncryptedTextField(_EncryptedTextField):
    """Text that only holders of FERNET_KEYS can read: AES-256-GCM, bound to its table and column.

    The field it extends has Fernet (AES-128-CBC and HMAC-SHA256) instead. Safe where that field is
    not: `bulk_update` stores ciphertext, a lost key raises DecryptionError, a fixture holds
    ciphertext and loads again.
    """

    def encode(self, value: Any) -> str:
        """The text that is encrypted in place of `value`."""
        return str(value)

    def decode(self, text: str) -> Any:
        """The value that `encode` was given."""
        return text

    # A plain property where the parent caches: a changed key takes effect at once.
    @property
    def keys(self) -> tuple[str | bytes, ...]:
        return key_ring.fernet_keys()

    def get_prep_value(self, value: Any) -> Any:
        if value is None or hasattr(value, "as_sql"):
            return value
        return self.encode(value)

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        # bulk_update hands over a CASE expression whose values come here again one by one;
        # encrypting the expression itself would store its repr.
        if hasattr(value, "as_sql"):
            return value
        text = self.get_db_prep_value(value, connection=connection, prepared=False)
        return None if text is None else connection.Database.Binary(self._encrypt(text))

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return None if value is None else self._decrypt(bytes(value))

    def is_current(self, token: bytes) -> bool:
        """Whether a stored value is as it would be written today: under the first key."""
        try:
            aes_gcm.unseal(self.keys[:1], self._context, token)
        except aes_gcm.NotOpened:
            return False
        return True

    @property
    def _context(self) -> str:
        """The place that a value is bound to. Of the row it cannot be: an id comes after it."""
        return f"{self.model._meta.db_table}.{self.column}"

    def _encrypt(self, text: str) -> bytes:
        return aes_gcm.seal(self.keys, self._context, text.encode())

    def _decrypt(self, token: bytes) -> Any:
        return self.decode(self._plain(token).decode())

    def _plain(self, token: bytes) -> bytes:
        try:
            return key_ring.opened(lambda keys: aes_gcm.unseal(keys, self._context, token))
        except aes_gcm.NotOpened:
            restart = "" if key_ring.are_reread() else _RESTART
            raise DecryptionError(
                f"{self} cannot be decrypted: none of FERNET_KEYS is the key that encrypted it. "
                f"{restart}Put that key back into FERNET_KEYS, after the first one."
            ) from None

    def value_to_string(self, obj: models.Model) -> Any:
        """What `dumpdata` writes: ciphertext, which `loaddata` takes under the same keys."""
        value = self.value_from_object(obj)
        if value is None:
            return None
        return _DUMPED + base64.b64encode(self._encrypt(self.encode(value))).decode()

    def dumped_in_slices(self, text: Iterable[bytes]) -> Iterator[bytes]:
        """What `value_to_string` has, in pieces, of an encoded value that comes in slices."""
        yield _DUMPED.encode()
        yield from slices.encoded(aes_gcm.seal_in_slices(self.keys, self._context, text))

    def text_of(self, dumped: bytes) -> bytes:
        """The encoded value that a dumped one holds, in UTF-8. Raises DecryptionError."""
        return self._plain(self._token(dumped))

    def to_python(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith(_DUMPED):
            return self._decrypt(self._token(value))
        return value

    def dumped_anew(self, dumped: str) -> str:
        """A dumped value under the first key: the same where it is so. Raises DecryptionError."""
        if dumped.startswith(_DUMPED) and self.is_current(self._token(dumped)):
            return dumped
        plain = self.encode(self.to_python(dumped))
        return _DUMPED + base64.b64encode(self._encrypt(plain)).decode()

    def _token(self, dumped: str | bytes) -> bytes:
        try:
            return slices.decoded(dumped, len(_DUMPED))
        except ValueError as error:
            raise DecryptionError(f"{self}: the dumped value is not base64.") from error

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

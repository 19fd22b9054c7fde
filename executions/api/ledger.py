"""The ledger, as far as anybody may know it: the keys its receipts are checked with."""

from __future__ import annotations

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from executions.api import schema
from executions.api.base import ApiView
from executions.api.rendering import json_response
from executions.ledger.entry_format import DOMAIN
from executions.ledger.keyring import keyring


class LedgerKeysView(ApiView):
    """Open to anybody: a receipt is there to be checked by whoever it is shown to."""

    authentication_classes = ()
    permission_classes = ()

    @extend_schema(
        operation_id="list_ledger_keys",
        summary="List the public keys of the ledger",
        description="Store them: a receipt is verified offline, with the key that it names.",
        tags=["ledger"],
        auth=[],
        responses={200: schema.LedgerKeysSerializer, **schema.errors(400, 503)},
    )
    def get(self, request: Request) -> HttpResponse:
        keys = [
            {"key_id": key.key_id, "algorithm": "Ed25519", "public_key": key.public_key}
            for key in keyring().values()
        ]
        response = json_response({"domain": DOMAIN.decode().strip(), "keys": keys})
        response["Cache-Control"] = "public, max-age=300"
        return response

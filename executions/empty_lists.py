"""What a list says while nothing is in it: what would be, and how it comes there."""

from __future__ import annotations

EMPTY = {
    "executions.execution": "Nothing was run yet. Whatever runs is here at once, queued and "
    "refused ones too: POST /api/v1/executions with a key, or `manage.py execute` on the server.",
    "executions.session": "No sandbox was kept yet. POST /api/v1/sessions opens one.",
    "executions.schedule": "Nothing runs by a schedule. POST /api/v1/schedules makes one.",
    "executions.snapshot": "No session's files were kept. POST /api/v1/sessions/{id}/snapshot "
    "keeps them.",
    "executions.ledgerentry": "Nothing was entered yet. Every run and every change is.",
    "executions.process": "No process of the service has been seen. `manage.py up` starts them.",
    "executions.policy": "Everything is allowed that the providers allow. A policy forbids, warns "
    "or asks for approval, for all tenants or for one.",
    "executions.approval": "Nothing waits, and nothing did. A policy whose verdict is `ask` has "
    "runs wait here.",
    "executions.budget": "No tenant has a budget: nobody is held to one.",
    "executions.spending": "Nothing was spent yet. What runs cost is counted where a provider has "
    "a price.",
    "executions.spendingalert": "No budget came near its limit.",
    "executions.alert": "No rule has found anything.",
    "executions.auditexport": "The ledger is sent nowhere. AUDIT_EXPORT_URL names a collector.",
    "executions.tenant": "There is no tenant. Runs belong to one, and so do keys.",
    "executions.apikey": "There is no key. Agents run code with one.",
    "executions.webhooksecret": "No tenant can sign webhooks. One with a secret here can name a "
    "URL with its runs.",
    "executions.webhookdelivery": "No run has named a URL that is told of its end.",
    "executions.legalhold": "Nothing is on hold: what is old enough is erased.",
    "providers.providerconfig": "No provider is configured, so nothing can run. Add one.",
    "providers.configversion": "Nothing was configured yet. Each change is a version here.",
    "providers.pendingchange": "No change waits. With TWO_PERSON_RULE=true changes wait here for a "
    "second administrator.",
    "providers.providerprice": "No provider has a price, so nothing is counted as spent.",
    "providers.route": "All runs go to the active provider. A route names several, with an order "
    "and a strategy, for all or for one tenant.",
    "providers.circuitbreaker": "No provider was taken out of service.",
    "auth.group": "There are no roles. `manage.py migrate` makes the three.",
    "axes.accessattempt": "Nobody has failed to sign in.",
}

"""The web application with a short step between the times at which a failed try is told.

For gunicorn. That a failure is told at whole multiples of the step is the subject of tests in
`tests/tenants/test_secret_receivers.py`; over a real server each would only wait for it.
"""

from __future__ import annotations

from importlib import import_module

from sandbox_site.asgi import application as application

# Once the models are there, which the application has loaded.
import_module("providers.services.trial").STEP_SECONDS = 0.05

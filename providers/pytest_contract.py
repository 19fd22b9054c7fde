"""A pytest plugin with which a package's own tests make sure of what its provider promises.

`pytest -p providers.pytest_contract` (or `pytest_plugins` in the top conftest) with a fixture
`contract_provider`, an initialized provider, and one test:

    def test_the_provider_keeps_its_promises(promise):
        promise()
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from providers.base import SandboxProvider


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "promise" not in metafunc.fixturenames:
        return
    from providers.contract import CHECKS

    cases = [
        pytest.param((check, language), id=f"{check.name}-{language}")
        for check in CHECKS
        for language in check.codes
    ]
    metafunc.parametrize("promise", cases, indirect=True)


@pytest.fixture
def promise(
    request: pytest.FixtureRequest, contract_provider: SandboxProvider
) -> Callable[[], None]:
    """One check in one language; skipped where the provider does not offer it."""
    from providers.contract import Probe, is_offered

    check, language = request.param
    if not is_offered(contract_provider, check, language):
        pytest.skip("not offered")
    return lambda: check.verify(Probe(contract_provider, language), check.codes[language])

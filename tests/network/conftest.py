from tests.support.execution_rows import auditor as auditor
from tests.support.vaults import bao as bao
from tests.support.vaults import openbao as openbao
from tests.support.vaults import ordered as ordered
from tests.support.vaults import path as path

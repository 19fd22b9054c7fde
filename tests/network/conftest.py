from tests.support.execution_rows import auditor as auditor

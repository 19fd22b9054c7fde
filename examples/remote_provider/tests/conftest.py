pytest_plugins = ["providers.pytest_contract"]

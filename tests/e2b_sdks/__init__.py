"""Programs that use every method of an SDK of E2B's, each run by that SDK as it was published."""

"""Decide when each task runs: tasks, ledger, device memory, pipeline, members."""

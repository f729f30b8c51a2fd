"""The pure core: what a step consists of, what it costs, how to plan, schedule and verify it.

Nothing here knows files, sockets, clocks, threads, torch or global random state.
"""

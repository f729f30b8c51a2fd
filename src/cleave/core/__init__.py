"""The pure core: what a step multiplies, what a device can do, what a block costs, how to cut.

Nothing here knows files, sockets, clocks, threads, torch or a global random state.
"""

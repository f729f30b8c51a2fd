"""`cleave bench`: train over emulated or real devices on this machine, and measure every step.

A scenario (TOML) is a grid of cells: fleet x model x mode x wire x grain. For each cell a server and its devices run in
processes of their own, over real sockets. Results are a table, a plot, and raw numbers from which both can be made
again.
"""

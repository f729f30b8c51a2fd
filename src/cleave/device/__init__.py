"""The volunteered machine: dial a server, hold operands, run programs, return results. Does not require torch."""

"""A volunteered machine's side: it dials a server, holds operands, runs programs, returns results. Needs no torch."""

"""Decide whether a result is right: projection checks, recomputation, trust."""

"""Admission: which connections are accepted and which devices may join."""

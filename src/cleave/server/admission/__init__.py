"""Decide who may connect and join: gate, tokens, certificate, handshake."""

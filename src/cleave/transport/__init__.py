"""Channels: how byte strings get from one side to the other. They know framing, not meaning."""

"""Channels carry byte strings between a server and a device. They know framing, not meaning."""

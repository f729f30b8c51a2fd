"""Channels: how byte strings get from one side to the other. They know nothing of what the bytes mean but its framing."""

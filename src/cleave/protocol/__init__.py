"""The wire protocol: messages, framing, encodings of numbers. Specified in docs/protocol.md."""

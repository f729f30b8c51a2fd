"""What travels: messages, how they are framed, how numbers are written. docs/protocol.md says it too."""

"""What travels: messages, how they are framed, how numbers are written. docs/protocol.md is the same for other languages."""

"""Place layers on devices for tokens to flow through."""

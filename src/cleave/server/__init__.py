"""The server side of a fleet: admission, scheduling, transfer and verification. Knows neither torch nor training."""

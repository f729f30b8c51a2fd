"""The server's side of a fleet: who is there, what goes to whom, what came back. Knows no torch and no training."""

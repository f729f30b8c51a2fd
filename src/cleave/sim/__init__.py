"""The simulator: batches of named models on fleets that need not exist, in virtual time."""

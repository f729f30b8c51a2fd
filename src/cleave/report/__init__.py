"""What a person or a script sees of the core's results: tables, JSON, pictures."""

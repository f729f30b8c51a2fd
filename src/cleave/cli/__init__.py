"""The command line: one file per verb; parses, calls, prints."""

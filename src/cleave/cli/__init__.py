"""The command line, one module per verb: parse, call, print."""

"""Support shared by tests: fleets, worlds in virtual time, device benches, golden frames."""

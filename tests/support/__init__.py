"""What several tests share: fleets, worlds in virtual time, device benches, golden frames."""

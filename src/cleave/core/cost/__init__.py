"""What work costs: bytes, FLOPs, memory and seconds; one law per quantity."""

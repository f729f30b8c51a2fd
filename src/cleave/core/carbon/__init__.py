"""What work emits: joules and kilograms of CO2e of devices, network and server, and of cloud GPUs for the same work."""

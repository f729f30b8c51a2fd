"""Many devices in one process: real workers over real sockets, as fast as their profiles say."""

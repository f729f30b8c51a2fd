"""What lies in run directories: read it, and remove what is no longer needed."""

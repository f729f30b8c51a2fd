"""What a training step consists of: shapes, gemms, decoders."""

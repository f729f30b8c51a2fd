"""Decide which device does what: blocks of gemms (`gemm`), resident layers (`resident`), a whole step (`step`)."""

"""How to cut: blocks of a gemm (`gemm`), what to do when devices leave or join (`repair`), a whole step (`step`)."""

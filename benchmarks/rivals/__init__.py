"""Other ways to train on several machines, and Cleave, on one testbed: same weights, batches, links and optimizer.

The modules that run inside the namespaces (`work`, `stages`, `ranks`, `worker`, `hivemind_peer`, `torchft_replica`)
import neither Cleave nor the testbed: they run in an environment of their own (`make rivals`). `python -m
benchmarks.rivals` is the command line.
"""

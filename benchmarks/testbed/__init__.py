"""A fleet of devices as network namespaces with rate-limited links, for real processes and real sockets.

`Testbed` builds one from the profiles of a fleet; `python -m benchmarks.testbed` is its command line.
"""

from benchmarks.testbed.bed import Reserved, Testbed, Traffic
from benchmarks.testbed.layout import SERVER, TestbedError

__all__ = ["SERVER", "Reserved", "Testbed", "TestbedError", "Traffic"]

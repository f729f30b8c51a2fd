"""Every error Cleave raises on purpose.

CleaveError                 root; its text is one sentence: what was expected, what came, what to do
 ├─ InputError              something a person gave is wrong (file, flag, name, number)
 │   ├─ FleetError          a fleet file or a mix
 │   └─ ModelError          a model name or a config.json
 ├─ InfeasibleError         the input is well formed, but no plan can exist for it
 ├─ ProtocolError           the other side of a connection sent what it must not
 ├─ WrongResult             a device returned what its operands do not give
 ├─ ConnectionLost          the other side of a connection is gone, or cannot be reached
 └─ FleetGoneError          work waits, and no device came for too long

The command line prints the sentence and exits with code 2.
"""


class CleaveError(Exception):
    pass


class InputError(CleaveError):
    pass


class FleetError(InputError):
    pass


class ModelError(InputError):
    pass


class InfeasibleError(CleaveError):
    pass


class ProtocolError(CleaveError):
    pass


class WrongResult(CleaveError):
    pass


class ConnectionLost(CleaveError):
    pass


class FleetGoneError(CleaveError):
    pass

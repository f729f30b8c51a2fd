"""Every error Cleave raises on purpose.

CleaveError                 root; the message is one sentence: what was expected, what was found, what to do
 ├─ InputError              bad user input: a file, flag, name or number
 │   ├─ FleetError          a fleet file or a mix
 │   └─ ModelError          a model name or a config.json
 ├─ InfeasibleError         valid input for which no plan exists
 ├─ ProtocolError           the peer violated the protocol
 ├─ WrongResult             a device returned a result that does not match its operands
 ├─ LeaseLost               a device that kept weights by itself is gone, or its gradients are incomplete
 ├─ ConnectionLost          the peer is gone or cannot be reached
 └─ FleetGoneError          no device was connected for too long while work waited

The command line prints the message and exits with code 2.
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


class LeaseLost(CleaveError):
    pass


class ConnectionLost(CleaveError):
    pass


class FleetGoneError(CleaveError):
    pass

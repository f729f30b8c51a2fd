"""Every error Cleave raises on purpose.

CleaveError                 root; its text is one sentence: what was expected, what came, what to do
 ├─ InputError              something a person gave is wrong (file, flag, name, number)
 │   ├─ FleetError          a fleet file or a mix
 │   └─ ModelError          a model name or a config.json
 └─ InfeasibleError         the input is well formed, but no plan can exist for it

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

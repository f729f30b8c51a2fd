"""The Python API: `Fleet`, `distribute`, `plan`; re-exported by `cleave`."""

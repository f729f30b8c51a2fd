"""The Python face: `Fleet`, `distribute`, `plan`; re-exported by `cleave`."""

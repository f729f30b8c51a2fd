"""The figures of a study, by name; light to import, for help texts."""

FIGURES = ("devices", "models", "limits", "loads", "recovery", "churn", "sensitivity", "carbon")

"""Puts this folder on the path, so that the tests here and in planner/ can import `fleets` and `tilings`.

No test depends on speed: hypothesis has no deadline here. Examples are the same in every run, so that CI is as green as
the commit; `pytest --hypothesis-seed=random` looks further.
"""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None, derandomize=True)
settings.load_profile("unhurried")

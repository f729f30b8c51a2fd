"""Puts this folder on the path, so that the tests here can import `samples`. Examples are the same in every run."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None, derandomize=True)
settings.load_profile("unhurried")

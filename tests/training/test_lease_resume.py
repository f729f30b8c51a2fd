"""A server that is killed while devices keep its weights resumes from its last checkpoint with the same losses."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.leased_run import STEPS, config_in, train_leased
from tests.support.leased_training import Told
from tests.support.runs import train

from cleave.train import checkpoint

pytestmark = pytest.mark.timeout(400)


def test_a_server_killed_while_devices_keep_weights_resumes_with_the_same_losses(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-m", "tests.support.leased_run", str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    found = checkpoint.latest(tmp_path / "run")
    assert found is not None
    assert 0 < found.step < STEPS
    told = Told()
    resumed = train_leased(tmp_path, told, resume=True)
    assert told.has("devices keep")
    plain = train(config_in(tmp_path), tmp_path / "plain")
    assert resumed.losses == pytest.approx(plain.losses, abs=1e-4)

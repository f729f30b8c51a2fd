"""The testbed of namespaces: its limits hold, and nothing stays behind. Needs root, `ip` and `tc`."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.testbed import SERVER, Reserved, Testbed, TestbedError, cores, removal, transfer
from benchmarks.testbed.__main__ import main
from benchmarks.testbed.bed import read_fleet
from benchmarks.testbed.check import common_bytes_per_s, measure
from benchmarks.testbed.layout import MOST_DEVICES, batches_of, layout_of

from cleave.core.fleet.profiles import Profiles

ROOT = Path(__file__).parents[2]
FLEETS = ROOT / "benchmarks" / "fleets"
PATIENCE_S = 60
SPIN = """
import json, time
began_s, idle_s = time.monotonic(), time.process_time()
while time.process_time() - idle_s < 0.2:
    pass
print(json.dumps([time.process_time() - idle_s, time.monotonic() - began_s]))
"""


def fleet(*links: tuple[float, float], medium_bytes_per_s: float | None = None) -> Profiles:
    count = len(links)
    shared = (
        {}
        if medium_bytes_per_s is None
        else {
            "medium": ("wifi",) * count,
            "medium_bytes_per_s": np.full(count, medium_bytes_per_s),
        }
    )
    return Profiles(
        names=tuple(f"d{number}" for number in range(count)),
        flops_per_s=np.full(count, 1e9),
        down_bytes_per_s=np.array([down for down, _ in links], dtype=float),
        up_bytes_per_s=np.array([up for _, up in links], dtype=float),
        latency_s=np.zeros(count),
        memory_bytes=np.full(count, 1e9),
        **shared,
    )


def left_behind(prefix: str) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"{prefix}*")]


def prefix_of(testbed: Testbed) -> str:
    return testbed.layout.hub.removesuffix("hub")


@pytest.fixture(scope="module")
def means() -> None:
    """Skip where no testbed can be built, and say why."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("a testbed needs root and the commands ip and tc")
    try:
        with Testbed(fleet((1e6, 1e6), medium_bytes_per_s=1e6)):
            pass
    except TestbedError as fault:
        pytest.skip(f"no testbed here: {fault}")


def transfer_s(testbed: Testbed, sender: str, receiver: str, count: int) -> float:
    """Seconds until `count` bytes sent by one place have arrived at another, from the first byte on."""
    program = [sys.executable, "-I", transfer.__file__]
    address = testbed.address(sender)
    listener = testbed.start(sender, [*program, "listen", address, "7071"], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    assert listener.stdout.readline() == b"listening\n"
    mover = testbed.start(receiver, [*program, "down", address, "7071", str(count)], stdout=subprocess.PIPE)
    said = mover.communicate(timeout=PATIENCE_S)[0]
    listener.kill()
    arrivals = [(seconds, got) for seconds, got in json.loads(said)]
    assert arrivals[-1][1] == count
    return arrivals[-1][0] - arrivals[0][0]


# -------------------------------------------------------------------------------------------------- limits


@pytest.mark.usefixtures("means")
def test_a_place_with_reserved_cores_gets_no_more_processor_time_than_that() -> None:
    if refusal := cores.why_not():
        pytest.skip(f"cores cannot be reserved here: {refusal}")
    share = 0.2
    with Testbed(fleet((1e6, 1e6)), Reserved(device=share, server=share)) as testbed:
        prefix = prefix_of(testbed)
        spinner = testbed.start("d0", [sys.executable, "-I", "-c", SPIN], stdout=subprocess.PIPE)
        spent_s, passed_s = json.loads(spinner.communicate(timeout=PATIENCE_S)[0])
        assert spent_s < 1.25 * share * passed_s
    assert not list(removal.groups_root().glob(f"{prefix}*"))


def test_more_cores_than_there_are_cannot_be_reserved(means: None) -> None:
    with pytest.raises(TestbedError, match=str(os.cpu_count())):
        Testbed(fleet((1e6, 1e6)), Reserved(device=1.0, server=float(os.cpu_count() or 1)))


@pytest.mark.usefixtures("means")
def test_no_transfer_is_faster_than_the_slowest_limit_on_its_way() -> None:
    fast, slow, count = 40e6, 1e6, 500_000
    with Testbed(fleet((fast, slow), (fast, fast), (slow, fast))) as testbed:
        burst = max(port.down.burst_bytes for port in testbed.layout.ports)
        at_least_s = (count - 2 * burst) / slow
        for sender, receiver in (("d0", SERVER), ("d0", "d1"), (SERVER, "d2"), ("d1", "d2")):
            assert transfer_s(testbed, sender, receiver, count) > at_least_s
        for sender, receiver in ((SERVER, "d0"), ("d1", SERVER), ("d1", "d0")):  # only fast limits on the way
            assert transfer_s(testbed, sender, receiver, count) < at_least_s


@pytest.mark.usefixtures("means")
def test_devices_on_one_medium_share_its_capacity_both_ways() -> None:
    own, shared = 50e6, 2e6
    with Testbed(fleet((own, own), (own, own), medium_bytes_per_s=shared)) as testbed:
        several = [each for each in measure(testbed, 0.3) if "at once" in each.what]
        assert len(several) == 1
        assert several[0].measured_bytes_per_s < shared * 1.05
        # From one device to the other, bytes take the medium twice.
        assert transfer_s(testbed, "d0", "d1", 400_000) > (400_000 - 100_000) / (shared / 2)


@pytest.mark.usefixtures("means")
def test_the_hub_counts_what_each_device_moved() -> None:
    with Testbed(fleet((40e6, 40e6), (40e6, 40e6))) as testbed:
        before = testbed.traffic()
        transfer_s(testbed, "d0", SERVER, 300_000)
        moved = {name: after - before[name] for name, after in testbed.traffic().items()}
        assert 300_000 < moved["d0"].up_bytes < 400_000
        assert moved["d0"].down_bytes < 100_000
        assert moved["d1"].up_bytes < 10_000


@pytest.mark.usefixtures("means")
def test_the_check_prints_every_link_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.csv"
    header = "device,flops_per_s,down_bytes_per_s,up_bytes_per_s,latency_s,memory_bytes\n"
    path.write_text(header + "a,1e9,5e6,4e6,0,1e9\nb,1e9,3e6,2e6,0,1e9\n")
    assert main([str(path), "--check", "--seconds", "0.1"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| a, down", "40.0"],
        ["| a, up", "32.0"],
        ["| b, down", "24.0"],
        ["| b, up", "16.0"],
    ]


def test_rates_of_transfers_count_only_while_all_are_under_way() -> None:
    one = [(0.0, 0), (1.0, 100), (2.0, 200)]
    other = [(1.0, 0), (2.0, 300), (9.0, 400)]
    assert common_bytes_per_s([one, other]) == 400
    with pytest.raises(TestbedError, match="overlap"):
        common_bytes_per_s([one, [(3.0, 0), (4.0, 9)]])


# ------------------------------------------------------------------------------------------------ commands


@pytest.mark.usefixtures("means")
def test_a_command_runs_once_for_each_device_and_knows_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    say = "echo $TESTBED_NAME $TESTBED_NUMBER $TESTBED_ADDRESS of $TESTBED_SERVER"
    assert main([str(FLEETS / "home4.csv"), "--", "sh", "-c", say]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        f"[home4-{number}] home4-{number} {number - 1} 10.77.1.{number} of 10.77.0.1" for number in (1, 2, 3, 4)
    ]


@pytest.mark.usefixtures("means")
def test_devices_stop_when_the_servers_command_ends() -> None:
    assert main([str(FLEETS / "wifi4.csv"), "--server", "sh -c 'exit 7'", "--", "sleep", "1000"]) == 7


@pytest.mark.usefixtures("means")
def test_an_unplugged_device_sends_nothing_more() -> None:
    with Testbed(fleet((1e6, 1e6))) as testbed:
        testbed.unplug("d0")
        shown = testbed.start("d0", ["cat", "/sys/class/net/eth0/operstate"], stdout=subprocess.PIPE)
        assert shown.communicate(timeout=PATIENCE_S)[0] == b"down\n"
        running = testbed.start("d0", ["sh", "-c", "echo here; exec sleep 1000"], stdout=subprocess.PIPE)
        assert running.stdout is not None
        assert running.stdout.readline() == b"here\n"
        testbed.kill("d0")
        assert running.wait(PATIENCE_S) == -signal.SIGKILL


# ------------------------------------------------------------------------------------------------ removal

HOLD = """
import sys
from benchmarks.testbed import Testbed
from benchmarks.testbed.bed import read_fleet
from pathlib import Path
with Testbed(read_fleet(Path(sys.argv[1]))) as testbed:
    testbed.start("wifi4-1", ["sleep", "1000"])
    print(testbed.layout.hub.removesuffix("hub"), testbed._watcher.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Another process with a testbed: the process, the prefix of its names, and its watcher's id."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(FLEETS / "wifi4.csv")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    prefix, watcher = process.stdout.readline().split()
    yield process, prefix, int(watcher)
    process.kill()
    process.wait(PATIENCE_S)
    process.stdin.close()
    process.stdout.close()
    removal.remove(prefix)


@pytest.mark.usefixtures("means")
def test_nothing_stays_behind_when_the_owner_is_killed(held: tuple[subprocess.Popen[str], str, int]) -> None:
    process, prefix, watcher = held
    assert len(left_behind(prefix)) == 6  # four devices, the server, the hub
    end = os.pidfd_open(watcher)
    process.kill()
    process.wait(PATIENCE_S)
    assert select.select([end], [], [], PATIENCE_S)[0]
    os.close(end)
    assert left_behind(prefix) == []


@pytest.mark.usefixtures("means")
def test_the_next_testbed_removes_what_a_killed_one_and_its_watcher_left(
    held: tuple[subprocess.Popen[str], str, int],
) -> None:
    process, prefix, watcher = held
    end = os.pidfd_open(watcher)
    os.kill(watcher, signal.SIGKILL)
    assert select.select([end], [], [], PATIENCE_S)[0]
    os.close(end)
    with Testbed(fleet((1e6, 1e6))):
        assert len(left_behind(prefix)) == 6  # its owner still lives
    process.kill()
    process.wait(PATIENCE_S)
    with Testbed(fleet((1e6, 1e6))):
        assert left_behind(prefix) == []


@pytest.mark.usefixtures("means")
def test_two_testbeds_stand_side_by_side() -> None:
    with Testbed(fleet((5e6, 5e6))) as one, Testbed(fleet((5e6, 5e6))) as other:
        assert not set(one.layout.namespaces) & set(other.layout.namespaces)
        assert transfer_s(one, "d0", SERVER, 10_000) >= 0
        one.close()
        assert left_behind(prefix_of(one)) == []
        assert len(left_behind(prefix_of(other))) == 3
        assert transfer_s(other, "d0", SERVER, 10_000) >= 0


# -------------------------------------------------------------------------------------------------- bad input


def test_without_root_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ip", "tc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([str(FLEETS / "home4.csv"), "--check"]) == 2
    assert "root" in capsys.readouterr().err


def test_without_tc_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(FLEETS / "home4.csv"), "--check"]) == 2
    said = capsys.readouterr().err
    assert "no tc" in said
    assert "iproute2" in said


@pytest.mark.parametrize("text", ["", "device\n", "\x00", "device,flops_per_s\nx,y\n"])
def test_a_broken_fleet_file_is_refused_in_a_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(text)
    assert main([str(path), "--check"]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_missing_fleet_file_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.csv"), "--check"]) == 2
    assert "none.csv" in capsys.readouterr().err


@pytest.mark.usefixtures("means")
def test_a_testbed_that_cannot_be_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    testbed = Testbed(fleet((1e6, 1e6)))
    monkeypatch.setattr(
        "benchmarks.testbed.bed.batches_of", lambda layout: [*batches_of(layout), (("ip",), ["nonsense"])]
    )
    with pytest.raises(TestbedError, match="nonsense"):
        testbed.__enter__()
    assert left_behind(prefix_of(testbed)) == []


@pytest.mark.usefixtures("means")
def test_a_place_that_does_not_exist_is_named() -> None:
    with Testbed(fleet((1e6, 1e6))) as testbed, pytest.raises(TestbedError, match="d7"):
        testbed.start("d7", ["true"])


def test_more_devices_than_a_bridge_has_ports_are_refused() -> None:
    with pytest.raises(TestbedError, match="1,001"):
        layout_of(fleet(*[(1.0, 1.0)] * (MOST_DEVICES + 1)), "x-")


def test_every_device_of_a_large_fleet_has_its_own_address() -> None:
    ports = layout_of(fleet(*[(1.0, 1.0)] * MOST_DEVICES), "x-").ports
    assert len({port.address for port in ports}) == len({port.namespace for port in ports}) == MOST_DEVICES


@pytest.mark.parametrize(
    "path", [FLEETS / f"{name}.csv" for name in ("home4", "mixed8", "wifi4")], ids=lambda path: path.stem
)
def test_every_fleet_of_the_testbed_can_be_read(path: Path) -> None:
    assert len(read_fleet(path)) in (4, 8)

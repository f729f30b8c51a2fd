"""Laws of profiles and of fleet CSV files."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from cleave.core.fleet.profiles import Floats, Profiles, describe, read_csv, write_csv
from cleave.errors import FleetError

HEADER = "device,flops_per_s,down_bytes_per_s,up_bytes_per_s,latency_s,memory_bytes"
NUMBERS = (
    "flops_per_s",
    "down_bytes_per_s",
    "up_bytes_per_s",
    "latency_s",
    "memory_bytes",
    "task_s",
    "byte_s",
    "medium_bytes_per_s",
    "watts",
    "idle_watts",
    "embodied_kgco2e",
)


def build(names: tuple[str, ...] = ("a", "b"), **columns: Floats | tuple[str, ...]) -> Profiles:
    given: dict[str, object] = {column: np.ones(len(names)) for column in NUMBERS[:5]}
    return Profiles(names=names, **(given | columns))  # pyright: ignore[reportArgumentType]


def columns_of(profiles: Profiles) -> list[object]:
    """Columns as bit patterns, so that NaN equals NaN and -0.0 differs from 0.0."""
    texts = [profiles.names, profiles.device_class, profiles.country, profiles.medium]
    return [*texts, *(getattr(profiles, column).tobytes() for column in NUMBERS)]


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(
    lambda text: text.isprintable() and text == text.strip()
)
names = texts.filter(lambda text: text not in ("", "server"))
above_zero = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
from_zero = st.floats(min_value=0, allow_infinity=False)
maybe = st.one_of(st.just(float("nan")), from_zero)


@st.composite
def profiles_of(draw: st.DrawFn) -> Profiles:
    chosen = draw(st.lists(names, min_size=1, max_size=6, unique=True))

    def column(entries: SearchStrategy[float]) -> Floats:
        return np.array(draw(st.lists(entries, min_size=len(chosen), max_size=len(chosen))))

    def words() -> tuple[str, ...]:
        return tuple(draw(st.lists(texts, min_size=len(chosen), max_size=len(chosen))))

    media = tuple(draw(st.lists(st.sampled_from(["", "wifi", "café"]), min_size=len(chosen), max_size=len(chosen))))
    capacities = {medium: draw(above_zero) if medium else float("nan") for medium in ("", "wifi", "café")}

    return Profiles(
        names=tuple(chosen),
        flops_per_s=column(above_zero),
        down_bytes_per_s=column(above_zero),
        up_bytes_per_s=column(above_zero),
        latency_s=column(from_zero),
        memory_bytes=column(above_zero),
        task_s=column(from_zero) + 0.0,
        byte_s=column(from_zero) + 0.0,
        medium_bytes_per_s=np.array([capacities[medium] for medium in media]),
        watts=column(maybe),
        idle_watts=column(maybe),
        embodied_kgco2e=column(maybe),
        device_class=words(),
        country=words(),
        medium=media,
    )


@given(profiles_of())
def test_a_written_fleet_reads_back_bit_for_bit(profiles: Profiles) -> None:
    again = read_csv(write_csv(profiles), "fleet.csv")
    # An unknown number is NaN, whatever the payload of the NaN.
    expected = dataclasses.replace(
        profiles,
        watts=np.where(np.isnan(profiles.watts), np.nan, profiles.watts),
        embodied_kgco2e=np.where(np.isnan(profiles.embodied_kgco2e), np.nan, profiles.embodied_kgco2e),
    )
    assert columns_of(again) == columns_of(expected)


@given(profiles_of())
def test_bom_crlf_blank_lines_and_padding_change_nothing(profiles: Profiles) -> None:
    text = write_csv(profiles)
    dressed = "\ufeff\r\n" + text.replace("\n", " \r\n \r\n").replace("\n,", "\n")
    assert columns_of(read_csv(dressed, "x")) == columns_of(read_csv(text, "x"))


@given(st.text())
@settings(max_examples=200)
def test_any_text_parses_to_a_fleet_or_a_fleet_error(text: str) -> None:
    for attempt in (text, f"{HEADER}\n{text}", f"{HEADER}\na,1,2,3,4,5\n{text}"):
        try:
            profiles = read_csv(attempt, "x")
        except FleetError:
            continue
        assert len(profiles) >= 1


@given(st.lists(st.lists(st.sampled_from(["a", "1", "-1", "nan", "inf", "", '"', "1e999", " 2 ", "server"]))))
def test_any_table_parses_to_a_fleet_or_a_fleet_error(rows: list[list[str]]) -> None:
    text = "\n".join([HEADER + ",watts", *(",".join(row) for row in rows)])
    try:
        profiles = read_csv(text, "x")
    except FleetError:
        return
    assert np.isfinite(profiles.flops_per_s).all()


def test_the_six_core_columns_are_enough() -> None:
    profiles = read_csv(f"{HEADER}\nphone,1e12,1e7,1e6,0.02,2e9\n", "fleet.csv")
    assert profiles.names == ("phone",)
    assert profiles.up_bytes_per_s.tolist() == [1e6]
    assert np.isnan(profiles.watts).all()
    assert profiles.device_class == ("",)
    assert columns_of(build()) == columns_of(build(watts=np.full(2, np.nan), country=("", "")))


def test_columns_may_come_in_any_order_and_unknown_ones_are_ignored() -> None:
    text = (
        "note, watts,memory_bytes,class,latency_s,up_bytes_per_s,down_bytes_per_s,flops_per_s,device,note\n"
        'x, ,6,laptop,5,4,3,2, "Ann\'s, ""old"" one" ,y\n'
        "x,7,6,,5,4,3,2,b,y\n"
    )
    profiles = read_csv(text, "fleet.csv")
    assert profiles.names == ('Ann\'s, "old" one', "b")
    assert [float(getattr(profiles, column)[0]) for column in NUMBERS[:5]] == [2, 3, 4, 5, 6]
    assert np.isnan(profiles.watts[0])
    assert profiles.watts[1] == 7
    assert profiles.device_class == ("laptop", "")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", "^fleet.csv .*empty.*device,flops_per_s"),
        ("\ufeff \r\n\r\n,,\n", "^fleet.csv .*empty.*device,flops_per_s"),
        (HEADER, "header.*no device"),
        ("a,1,1,1,1,1", "device, flops_per_s, down_bytes_per_s, .*device,flops_per_s.*'a,1,1,1,1,1'"),
        (HEADER.replace(",latency_s", "") + "\na,1,1,1,1", f"[^,] latency_s: .*{HEADER}"),
        (HEADER + ",latency_s\na,1,1,1,1,1,1", "latency_s twice"),
        (HEADER + "\na,1,1,1,1,1\n\nb,1,1,1", r"line 4: .*\b6 cells.*\b4\b"),
        (HEADER + "\na,1,1,1,1,1,5", r"line 2: .*\b6 cells.*\b7\b"),
        (HEADER + "\na,fast,1,1,1,1", "line 2: flops_per_s of device 'a' .*number.*'fast'"),
        (HEADER + "\na,1,1,,1,1", "line 2: up_bytes_per_s of device 'a' .*number.*empty"),
        (HEADER + "\na,nan,1,1,1,1", "line 2: flops_per_s of device 'a' .*finite.*above 0.*nan"),
        (HEADER + "\na,1,inf,1,1,1", "line 2: down_bytes_per_s of device 'a' .*finite.*above 0.*inf"),
        (HEADER + "\na,1,1,-3,1,1", "line 2: up_bytes_per_s of device 'a' .*above 0.*-3.0"),
        (HEADER + ",medium\na,1,1,1,1,1,wifi", "line 2: medium_bytes_per_s of device 'a' .*'wifi'.*nan"),
        (
            HEADER + ",medium,medium_bytes_per_s\na,1,1,1,1,1,wifi,5\nb,1,1,1,1,1,wifi,6",
            "line 3: medium_bytes_per_s of device 'b' .*the same for all.* 6.0",
        ),
        (HEADER + "\na,1,1,1,1,0", "line 2: memory_bytes of device 'a' .*above 0.* 0.0"),
        (HEADER + "\na,1,1,1,-1,1", "line 2: latency_s of device 'a' .*at least 0.*-1.0"),
        (HEADER + "\na,1,1,1,nan,1", "line 2: latency_s of device 'a' .*at least 0.*nan"),
        (HEADER + ",watts\na,1,1,1,1,1,-5", "line 2: watts of device 'a' .*at least 0.*unknown.*-5.0"),
        (HEADER + ",watts\na,1,1,1,1,1,lots", "line 2: watts of device 'a' .*number.*'lots'"),
        (HEADER + "\na,1,1,1,1,1\nb,1,1,1,1,1\na,1,1,1,1,1", "line 4: .*unique.*'a'"),
        (HEADER + "\n,1,1,1,1,1", "line 2: every device .*name"),
        (HEADER + "\nserver,1,1,1,1,1", "line 2: .*'server'.*reserved"),
        (HEADER + "\na\x07b,1,1,1,1,1", r"line 2: device .*printable.*'a\\x07b'"),
        (HEADER + f"\n{'a' * 300},1,1,1,1,1", "line 2: device .*at most 200 .*aaaa"),
        (HEADER + '\n"a,1,1,1,1,1\nb,1,1,1,1,1', "line 2: .*quote"),
        (HEADER + f"\n{'a' * 200_000},1,1,1,1,1", "line 2: .*comma-separated"),
    ],
)
def test_each_fault_in_a_file_has_its_own_message(text: str, facts: str) -> None:
    with pytest.raises(FleetError, match=facts) as caught:
        read_csv(text, "fleet.csv")
    message = str(caught.value)
    assert message.startswith("fleet.csv")
    assert "; " in message
    assert "\n" not in message
    assert len(message) < 320


@pytest.mark.parametrize(
    ("names", "columns", "sentence"),
    [
        ((), {}, "at least one device"),
        (("a", "a"), {}, "unique"),
        (("a", "server"), {}, "reserved"),
        (("a", ""), {}, "needs a name, but number 2 has none"),
        (("a", " b"), {}, "without spaces at its ends"),
        (("a", "b"), {"flops_per_s": np.ones(3)}, "flops_per_s needs one entry for each of the 2 devices"),
        (("a", "b"), {"latency_s": np.ones((2, 1))}, "latency_s needs one entry for each of the 2 devices"),
        (("a", "b"), {"watts": np.ones(1)}, "watts needs one entry"),
        (("a", "b"), {"country": ("us",)}, "country needs one entry"),
        (("a", "b"), {"up_bytes_per_s": np.array([1, 0])}, "up_bytes_per_s of device 'b'"),
        (("a", "b"), {"embodied_kgco2e": np.array([np.inf, 1])}, "embodied_kgco2e of device 'a'"),
    ],
)
def test_impossible_profiles_are_refused(names: tuple[str, ...], columns: dict[str, Floats], sentence: str) -> None:
    with pytest.raises(FleetError, match=sentence):
        build(names, **columns)


def test_validated_profiles_are_immutable() -> None:
    speeds = np.ones(2)
    profiles = build(flops_per_s=speeds)
    with pytest.raises(ValueError, match="read-only"):
        profiles.flops_per_s[0] = -1
    assert speeds.flags.writeable


@given(profiles_of(), st.data())
def test_taking_devices_keeps_their_whole_profiles(profiles: Profiles, data: st.DataObject) -> None:
    some = st.lists(st.integers(0, len(profiles) - 1), min_size=1, unique=True)
    indices = np.array(data.draw(some), dtype=np.int64)
    lines = write_csv(profiles.take(np.arange(len(profiles)))).splitlines()
    assert lines == write_csv(profiles).splitlines()
    taken = profiles.take(indices)
    assert taken.names == tuple(profiles.names[i] for i in indices)
    assert taken.device_class == tuple(profiles.device_class[i] for i in indices)
    assert taken.country == tuple(profiles.country[i] for i in indices)
    for column in NUMBERS:
        np.testing.assert_array_equal(getattr(taken, column), getattr(profiles, column)[indices])


def test_a_summary_counts_classes_and_gives_quantiles_and_totals() -> None:
    count = 11
    profiles = build(
        tuple(map(str, range(count))),
        flops_per_s=np.arange(1.0, count + 1),
        watts=np.array([5.0, 7.0] + [np.nan] * 9),
        device_class=("laptop",) * 3 + ("phone",) * 7 + ("",),
    )
    summary = describe(profiles)
    assert summary.devices == count
    assert summary.classes == (("phone", 7), ("laptop", 3), ("unknown", 1))
    assert summary.countries == (("unknown", count),)
    by_name = {column.column: column for column in summary.columns}
    speed = by_name["flops_per_s"]
    assert (speed.p10, speed.p50, speed.p90, speed.total, speed.known) == (2, 6, 10, 66, count)
    assert (by_name["watts"].known, by_name["watts"].total) == (2, 12)
    assert by_name["latency_s"].total is None
    assert "embodied_kgco2e" not in by_name
    assert json.loads(json.dumps(dataclasses.asdict(summary)))["devices"] == count

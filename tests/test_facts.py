"""The fact tables are complete, have sources, and mean what README.md says about them."""

from __future__ import annotations

from collections import defaultdict
from importlib import resources
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest

from cleave.core.fleet import sampling
from cleave.facts import TableName, table

ACCESS = table("access")
DEVICES = table("devices")
PUBLISHED = [row for row in ACCESS if not row["share"]]
DEVICE_NUMBERS = (
    "sustained_tflops",
    "ram_gb",
    "vram_gb",
    "load_w",
    "idle_w",
    "embodied_kgco2e",
    "lifetime_y",
    "weight",
)


def test_every_csv_in_the_package_is_a_named_table() -> None:
    files = {entry.name for entry in resources.files("cleave.facts").iterdir() if entry.name.endswith(".csv")}
    assert files == {f"{name}.csv" for name in get_args(TableName)}


@pytest.mark.parametrize("name", get_args(TableName))
def test_every_row_has_a_source(name: TableName) -> None:
    rows = table(name)
    assert rows
    assert all(row["source"].strip() for row in rows)


@pytest.mark.parametrize("name", get_args(TableName))
def test_the_readme_describes_every_table(name: TableName) -> None:
    assert f"`{name}.csv`" in resources.files("cleave.facts").joinpath("README.md").read_text(encoding="utf-8")


def test_every_numeric_cell_of_a_device_is_a_plain_number_or_empty() -> None:
    for row in DEVICES:
        for column in DEVICE_NUMBERS:
            assert not row[column] or float(row[column]) >= 0, (row["device"], column)
        assert row["sustained_basis"]


def test_every_device_that_can_be_drawn_has_speed_memory_and_power() -> None:
    for row in DEVICES:
        if float(row["weight"]) > 0:
            assert all(float(row[c]) > 0 for c in ("sustained_tflops", "ram_gb", "load_w")), row["device"]


def test_weights_add_up_to_one_within_each_class() -> None:
    total: dict[str, float] = defaultdict(float)
    for row in DEVICES:
        total[row["class"]] += float(row["weight"])
    assert total == pytest.approx(dict.fromkeys(sampling.CLASSES, 1.0))


def test_no_sustained_speed_contradicts_its_measurement() -> None:
    """A speed based on a bare measurement equals the number in measured_gemm.csv."""
    measured = [float(row["effective_tflops"]) for row in table("measured_gemm")]
    rows = [row for row in DEVICES if row["sustained_basis"].startswith("measured (")]
    assert len(rows) >= 5
    for row in rows:
        nearest = min(abs(float(row["sustained_tflops"]) / value - 1) for value in measured)
        assert nearest < 0.01, row["device"]


def test_shares_add_up_to_one_within_each_country_and_kind() -> None:
    total: dict[tuple[str, str], float] = defaultdict(float)
    for row in ACCESS:
        if row["share"]:
            total[row["country"], row["kind"]] += float(row["share"])
    assert all(value == pytest.approx(1.0) for value in total.values())
    assert {("us", "fixed"), ("us", "mobile"), ("world", "fixed"), ("world", "mobile")} <= set(total)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda r: f"{r['country']}-{r['kind']}-{r['technology']}")
def test_drawn_links_have_the_published_rates(row: dict[str, str]) -> None:
    rng = np.random.default_rng(7)
    country, statistic = row["country"], np.median if row["technology"] == "median" else np.mean
    kind = "mobile" if row["kind"] == "mobile" else "fixed"
    links = sampling.draw_links(ACCESS, country=country, kind=kind, count=40_000, rng=rng)
    down, up = links.down_mbps, links.up_mbps
    if row["kind"] == "wifi":
        radio = sampling.draw_links(ACCESS, country=country, kind="wifi", count=40_000, rng=rng)
        down, up = np.minimum(down, radio.down_mbps), np.minimum(up, radio.up_mbps)
    assert statistic(down) == pytest.approx(float(row["down_median_mbps"]), rel=0.15)
    if row["up_median_mbps"]:
        assert statistic(up) == pytest.approx(float(row["up_median_mbps"]), rel=0.15)


def test_published_rates_are_those_of_the_networks_table() -> None:
    known = {(row["down_mbps"], row["statistic"]) for row in table("networks")}
    for row in PUBLISHED:
        assert (row["down_median_mbps"], row["technology"]) in known, row["country"]


def test_the_uk_has_the_low_tail_that_a_single_lognormal_misses() -> None:
    links = sampling.draw_links(ACCESS, country="gb", kind="fixed", count=40_000, rng=np.random.default_rng(7))
    assert 0.08 < np.mean(links.down_mbps < 30) < 0.18  # Ofcom 2023: 12 %


def test_countries_with_only_a_median_keep_the_order_of_their_medians() -> None:
    rows = [row for row in PUBLISHED if row["country"] in ("vn", "no", "jp", "fr", "sg")]
    rows.sort(key=lambda row: float(row["down_median_mbps"]))
    medians = [
        np.median(
            sampling.draw_links(
                ACCESS, country=row["country"], kind="fixed", count=20_000, rng=np.random.default_rng(3)
            ).up_mbps
        )
        for row in rows
    ]
    assert len(rows) == 5
    assert all(slower < faster for slower, faster in pairwise(medians))

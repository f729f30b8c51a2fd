"""The rivals' arrangements: fair, complete, and of the same model as Cleave trains."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from benchmarks.recovery import judge
from benchmarks.rivals.__main__ import main
from benchmarks.rivals.ranks import Alone, plain_losses
from benchmarks.rivals.shape import SEQUENCES, Work
from benchmarks.rivals.stages import Stage, layer_runs
from benchmarks.rivals.summary import summary
from benchmarks.rivals.table import best_of, markdown, merge
from benchmarks.rivals.turns import Result
from benchmarks.rivals.variants import Variant, fastest, least_step_s, order_by_uplink, variants_of
from benchmarks.rivals.work import batch, build, loss_of
from hypothesis import given
from hypothesis import strategies as st

from cleave.train.models import build_model

UPS = st.lists(st.floats(1, 100), min_size=2, max_size=16)


@given(layers=st.integers(1, 40), stages=st.integers(1, 40))
def test_stages_take_every_layer_once_and_differ_by_one_at_most(layers: int, stages: int) -> None:
    runs = layer_runs(layers, stages)
    assert [layer for run in runs for layer in run] == list(range(layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(UPS)
def test_uplinks_rise_to_the_middle_and_fall_again(ups: list[float]) -> None:
    order = order_by_uplink(ups)
    assert sorted(order) == list(range(len(ups)))
    ordered = [ups[device] for device in order]
    top = ordered.index(max(ordered))
    assert ordered[: top + 1] == sorted(ordered[: top + 1])
    assert ordered[top:] == sorted(ordered[top:], reverse=True)


@given(UPS, st.data())
def test_the_fastest_ranks_are_as_fast_as_any_left_out(ups: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(ups)))
    chosen = fastest(ups, count)
    assert list(chosen) == sorted(set(chosen))
    left_out = set(range(len(ups))) - set(chosen)
    assert all(ups[one] >= ups[other] for one in chosen for other in left_out)


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("layers", [4, 8])
def test_every_arrangement_uses_each_rank_once_and_divides_the_batch(devices: int, layers: int) -> None:
    variants = variants_of([float(rank + 1) for rank in range(devices)], layers)
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        ranks = list(itertools.chain.from_iterable(variant.pipelines))
        assert len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(range(devices))
        if variant.kind in ("gpipe", "1f1b"):
            assert len(variant.pipelines[0]) <= layers
            assert SEQUENCES % (len(variant.pipelines) * variant.micro_batches) == 0


def test_a_ring_sends_twice_the_gradients_of_the_other_devices() -> None:
    assert least_step_s(Variant(kind="ddp"), [2.0, 1.0, 4.0, 4.0], 100.0, 100.0) == 2 * 0.75 * 100
    assert least_step_s(Variant(kind="ddp", wire="fp16"), [2.0, 1.0, 4.0, 4.0], 100.0, 100.0) == 0.75 * 100
    assert least_step_s(Variant(kind="fsdp"), [1.0, 1.0], 10.0, 100.0) == 0.5 * 210
    assert least_step_s(Variant(kind="gpipe"), [1.0, 1.0], 10.0, 100.0) == 0


def test_the_demo_model_is_that_of_cleave_train_and_the_other_has_ten_times_its_weights() -> None:
    ours = build_model("demo", "fp32", 1)[0]
    rivals = build(Work(model="demo", lora=False))
    assert {name: weight.shape for name, weight in ours.named_parameters()} == {
        name: weight.shape for name, weight in rivals.named_parameters()
    }
    small, large = (Work(model=name, lora=False).weights for name in ("demo", "demo10"))
    assert 9.5 < large / small < 10.5


@pytest.mark.parametrize("lora", [False, True])
def test_weights_are_counted_without_building_them(lora: bool) -> None:
    work = Work(model="demo", lora=lora)
    weights = list(build(work).parameters())
    assert work.weights == sum(weight.numel() for weight in weights)
    assert work.trained == sum(weight.numel() for weight in weights if weight.requires_grad)


@pytest.mark.parametrize("lora", [False, True])
def test_stages_in_a_row_compute_what_the_whole_model_does(lora: bool) -> None:
    work = Work(model="demo", lora=lora)
    whole = build(work)
    tokens = batch(0)[:2]
    passed = tokens
    with torch.no_grad():
        for stage in range(3):
            passed = Stage(work, stage, 3, torch.float32)(passed)
        expected = whole(input_ids=tokens).logits
    torch.testing.assert_close(passed, expected, rtol=1e-4, atol=1e-4)


def test_batches_and_weights_are_the_same_in_every_process() -> None:
    assert torch.equal(batch(3), batch(3))
    assert not torch.equal(batch(3), batch(4))
    work = Work(model="demo", lora=True)
    assert all(
        torch.equal(one, two) for one, two in zip(build(work).parameters(), build(work).parameters(), strict=True)
    )


def test_the_loss_is_that_of_transformers() -> None:
    model, tokens = build(Work(model="demo", lora=False)), batch(0)[:2]
    out = model(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(loss_of(out.logits, tokens), out.loss)


def test_training_lowers_the_loss() -> None:
    losses = plain_losses(Work(model="demo", lora=False), 3)
    assert losses[-1] < losses[0]
    assert Alone(Work(model="demo", lora=False)).step(batch(0)) == pytest.approx(losses[0])


def result(system: str, settings: str, *step_s: float, error: str = "") -> Result:
    count = len(step_s)
    return Result(
        system=system,
        settings=settings,
        step_s=list(step_s),
        losses=[5.0] * count,
        down_bytes=[[1_000_000, 2_000_000]] * count,
        up_bytes=[[500_000, 400_000]] * count,
        cpu_s=[1.0] * count,
        peak_memory_bytes=[10_000_000, 20_000_000] if count else [],
        predicted_s=[2.0] * count if system == "Cleave" else [],
        error=error,
    )


def test_the_table_keeps_the_best_setting_and_says_who_wins() -> None:
    results = [
        result("Cleave", "auto", 9.0, 9.0, 4.0, 4.0),
        result("one device alone", "no network", 1.0, 1.0, 1.0),
        result("torch GPipe", "2 stages", 9.0, 9.0, 2.0, 3.0),
        result("torch GPipe", "4 stages", 9.0, 9.0, 8.0),
        result("torch DDP", "fp32", error="not run: its bytes take at least 99 s a step"),
        result("Cleave", "auto", 9.0, 9.0, 6.0),
    ]
    every = merge(results)
    best = best_of(every)
    assert [each.system for each in best] == ["Cleave", "one device alone", "torch GPipe", "torch DDP"]
    text = markdown("home", "command", best, "idle", every)
    assert "| torch GPipe | 2 stages | 2.50 | 2.00-3.00 | 1.60 | 0.50 | 2.00 |" in text
    assert "99 s a step" in text
    assert "| 3 | 6.00 | 2.00 | 3.00 |" in text
    assert "4 stages: 8.00" in text


def test_the_time_lost_is_that_beyond_a_usual_step() -> None:
    lost = judge("x", [10.0, 12.0, 14.0, 21.0, 24.0], 15.0, "")
    assert (lost.normal_s, lost.lost_s, lost.after_s) == (2.0, 5.0, 3.0)
    over = judge("x", [10.0, 12.0, 14.0], 15.0, "the run is over")
    assert over.lost_s is None
    assert over.outcome == "the run is over"


def test_without_the_rivals_environment_the_command_says_how_to_make_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.rivals.turns.RIVALS_PYTHON", tmp_path / "none")
    fleet = Path(__file__).parents[2] / "benchmarks" / "fleets" / "home4.csv"
    code = main([str(fleet), "--systems", "torch", "--keep", str(tmp_path)])
    assert code == 2
    said = capsys.readouterr().err
    assert "make rivals" in said or "root" in said or "iproute2" in said


def test_the_summary_puts_a_cell_in_a_row_with_cleave_over_each_rival() -> None:
    cell = best_of(
        merge(
            [
                result("Cleave", "auto", 9.0, 9.0, 4.0, 4.0),
                result("torch GPipe", "2 stages", 9.0, 9.0, 2.0),
                result("torch DDP", "fp32", error="not run"),
            ]
        )
    )
    row = summary([("home4-demo-full", cell)]).splitlines()[2]
    assert row == "| home4-demo-full | 4.00 | 2.00 | 2.00 |  | |  | 2.00 (2.00) | not run |"

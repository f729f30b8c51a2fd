"""Weights and optimizer states that stay on devices: the same training, whatever the caller does and whoever leaves."""

from __future__ import annotations

import asyncio
import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.decoders import make, tokens
from tests.support.doomed import Kind, Moment, When
from tests.support.in_process import ROOMY, InProcess
from tests.support.leased_training import (
    OPTIMIZERS,
    Act,
    Told,
    check_same,
    compare,
    leased_count,
    on_devices,
    train,
)
from tests.support.plans import leased, plan_of, stage_of
from torch import nn, optim

from cleave.core.plan.resident.problem import Problem
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.train.offload import decoder as stack
from cleave.train.offload.boundary_log import BoundaryLog, LogFullError
from cleave.train.offload.distribute import distribute, undistribute
from cleave.train.offload.leased_tensors import LeasedGradient, LeasedParameter


@pytest.mark.parametrize(
    ("family", "optimizer", "passes"),
    [
        ("llama", "adamw", 1),
        ("qwen2", "fused", 2),
        ("opt", "adam", 1),
        ("gpt2", "sgd", 2),
        ("llama", "momentum", 2),
        ("gpt2", "nesterov", 1),
        ("opt", "groups", 2),
    ],
)
def test_leased_weights_train_the_same(family: str, optimizer: str, passes: int) -> None:
    told = Told()
    assert compare(told, family=family, optimizer=optimizer, passes=passes) > 0
    assert told.has("devices keep")


def test_leased_weights_train_the_same_on_a_16_bit_wire() -> None:
    told = Told()
    assert compare(told, wire="bf16", tolerance=0.05) > 0


@pytest.mark.parametrize(
    ("kind", "when", "number", "device", "passes"),
    [
        ("forward", "told", 9, 0, 1),
        ("forward", "returning", 10, 1, 2),
        ("backward", "told", 10, 2, 1),
        ("backward", "returning", 14, 0, 2),
        ("square_sum", "told", 2, 1, 1),
        ("square_sum", "returning", 1, 2, 2),
        ("update", "told", 2, 0, 1),
        ("update", "returning", 2, 1, 2),
        ("update", "returned", 1, 2, 1),
        ("hold", "told", 1, 1, 1),
    ],
)
def test_a_device_that_leaves_changes_no_loss(kind: Kind, when: When, number: int, device: int, passes: int) -> None:
    told = Told()
    compare(told, dooms={device: Moment(kind, when, number)}, passes=passes)
    assert kind == "hold" or told.has("recovered")


def test_two_devices_that_leave_one_after_the_other_change_no_loss() -> None:
    told = Told()
    compare(told, dooms={0: Moment("update", "told", 1), 1: Moment("backward", "told", 12)})
    assert told.has("recovered")


def test_weights_of_devices_that_all_left_are_recovered_by_the_server_alone() -> None:
    plain = make("llama")
    with on_devices(Told(), {device: Moment("update", "returned", 1) for device in range(3)}) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", grain="resident")
        for each in (plain, model):
            optimizer = OPTIMIZERS["adamw"](each.parameters())
            stack.know(model, optimizer)
            for step in range(2):
                optimizer.zero_grad()
                batch = tokens(step, 3)
                each(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
        undistribute(model)
        check_same(model, plain)


# ------------------------------------------------------------------------------------------------ callers


def _read(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        _evaluated.append(sum(one.sum().item() for one in model.parameters()))


def _write(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(0.5)


def _write_data(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        for one in model.parameters():
            one.data *= 0.5


def _evaluate(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    model.eval()
    with torch.no_grad():
        batch = tokens(99, 2)
        _evaluated.append(model(input_ids=batch, labels=batch).loss.item())
    model.train()


def _copy(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        assert type(next(copy.deepcopy(model).parameters())) is nn.Parameter


def _reload(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _forget_backward(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        batch = tokens(77, 2)
        assert model(input_ids=batch, labels=batch).loss.item() > 0


def _change_rate(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * step


_evaluated: list[float] = []


@pytest.mark.parametrize("act", [_read, _write, _write_data, _evaluate, _copy, _reload, _forget_backward, _change_rate])
def test_whatever_a_caller_does_between_steps_it_sees_current_weights(act: Act) -> None:
    _evaluated.clear()
    assert compare(Told(), after_step=act) > 0
    half = len(_evaluated) // 2
    assert _evaluated[:half] == pytest.approx(_evaluated[half:], abs=1e-4)


def _read_gradient(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        for one in model.parameters():
            assert one.grad is not None
            one.grad.add_(0.01)


def _skip(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        optimizer.zero_grad()


def _drop_some(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        for number, one in enumerate(model.parameters()):
            if number % 2:
                one.grad = None


def _one_more_pass(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        batch = tokens(55, 2)
        (3 * model(input_ids=batch, labels=batch).loss).backward()


def _no_backward(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 2:
        batch = tokens(55, 2)
        assert model(input_ids=batch, labels=batch).loss.item() > 0


@pytest.mark.parametrize("act", [_read_gradient, _skip, _drop_some, _one_more_pass, _no_backward])
def test_whatever_a_caller_does_to_gradients_is_done(act: Act) -> None:
    assert compare(Told(), after_backward=act) > 0


def test_gradients_on_devices_have_their_norm_and_shape() -> None:
    plain = make("llama")
    batch = tokens(0, 3)
    plain(input_ids=batch, labels=batch).loss.backward()
    with on_devices(Told()) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", grain="resident")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        stack.know(model, optimizer)
        model(input_ids=batch, labels=batch).loss.backward()
        stand_ins = [one.grad for one in model.parameters() if isinstance(one.grad, LeasedGradient)]
        assert stand_ins
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert one.grad.shape == other.grad.shape
            torch.testing.assert_close(torch.linalg.vector_norm(one.grad), torch.linalg.vector_norm(other.grad))
        assert leased_count(model) == len(stand_ins)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(one.grad + 0.0, other.grad, rtol=1e-4, atol=1e-6)


def test_leased_weights_cross_no_link() -> None:
    def moved(*, may_lease: bool) -> tuple[float, float, int]:
        """Bytes per step down and up from the third step on, and those of leased weights."""
        totals: list[tuple[int, int]] = []

        def note(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
            optimizer.zero_grad()
            totals.append((fleet.cluster.totals().down_bytes, fleet.cluster.totals().up_bytes))

        with on_devices(Told()) as fleet:
            options: Any = {"offload": "always", "grain": "resident", "may_lease": may_lease}
            model = distribute(make("llama"), fleet.cluster, **options)
            train(model, OPTIMIZERS["adamw"](model.parameters()), after_step=note)
            weights = 4 * sum(one.numel() for one in model.parameters() if isinstance(one, LeasedParameter))
            undistribute(model)
        (first_down, first_up), (last_down, last_up) = totals[1], totals[-1]
        steps = len(totals) - 2
        return (last_down - first_down) / steps, (last_up - first_up) / steps, weights

    down, up, weights = moved(may_lease=True)
    other_down, other_up, _ = moved(may_lease=False)  # every stage is then held by all three devices
    assert other_down - down > weights > 0
    assert other_up - up > weights


@pytest.mark.parametrize(("counts", "share"), [((2, 1, 4), 0.7), ((1, 3, 1), 1.3), ((4, 1), 1.3)])
def test_a_lease_outlives_another_plan_and_fetches_only_what_changes(counts: tuple[int, ...], share: float) -> None:
    """`share` bounds what comes up, of everything that is leased, with headers."""
    layouts = [leased((1, 2, 2))]
    ups: list[int] = []

    def change(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad()
        ups.append(fleet.cluster.totals().up_bytes)
        if step == 1:
            layouts.append(leased(counts))
            fleet.cluster.planning._passes.clear()

    plain, told = make("llama"), Told()
    expected = train(plain, OPTIMIZERS["adamw"](plain.parameters()))
    with InProcess([ROOMY] * 3, arrange=lambda problem, **_: layouts[-1](problem), listener=told) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", tell=told, grain="resident")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        stack.know(model, optimizer)
        assert train(model, optimizer, after_step=change) == pytest.approx(expected, abs=1e-4)
        everything = 12 * sum(one.numel() for one in model.parameters() if isinstance(one, LeasedParameter))
        assert 0 < (ups[2] - ups[1]) - (ups[-1] - ups[-2]) < share * everything
        undistribute(model)
        check_same(model, plain)
    assert sum("devices keep" in note for note in told.notes) == 1, "it was never begun again"


def test_an_optimizer_that_devices_cannot_run_stays_here_and_says_why() -> None:
    told = Told()
    with on_devices(told) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", tell=told, grain="resident")
        plain = make("llama")
        expected = train(plain, optim.Adagrad(plain.parameters(), lr=1e-2))
        assert train(model, optim.Adagrad(model.parameters(), lr=1e-2)) == pytest.approx(expected, abs=1e-4)
        undistribute(model)
    assert told.has("Adagrad")


def test_weights_read_in_every_step_stay_here_from_then_on() -> None:
    told = Told()

    def read(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        assert all(one.sum().item() < 1e9 for one in model.parameters())

    compare(told, after_step=read)
    assert told.has("weights are read in every step")


@pytest.mark.parametrize(("trust", "may"), [("known", 0), ("own", 3)])
def test_only_measured_devices_of_the_owner_keep_weights(trust: Any, may: int) -> None:
    with InProcess([ROOMY] * 3, trust=trust) as fleet:
        assert fleet.cluster.planning._lenders() == frozenset()
        for member in fleet.cluster.here():
            member.is_measured = True
        lenders = fleet.cluster.planning._lenders()
        assert lenders is not None
        assert len(lenders) == may


def test_a_device_that_a_plan_leaves_out_is_measured_all_the_same() -> None:
    def on_one(problem: Problem, **_: object) -> ResidentPlan:
        return plan_of([stage_of(0, len(problem.sums), [[min(problem.profiles.names)]])], 8)

    async def measured() -> None:
        async with asyncio.timeout(120):
            while not all(member.is_measured for member in fleet.cluster.here()):
                await asyncio.sleep(0)

    with InProcess([ROOMY] * 2, arrange=on_one) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", grain="resident")
        train(model, OPTIMIZERS["adamw"](model.parameters()), steps=1)
        fleet._do(measured())
        undistribute(model)


def test_a_lease_goes_on_in_chunks_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, begun, seen = itertools.cycle((8, 4)), list[object](), list[Problem]()

    def arrange(problem: Problem, **options: Any) -> ResidentPlan:
        seen.append(problem)  # the same devices every time, late or not
        plan = leased((1, 2, 2))(replace(problem, profiles=seen[0].profiles), **options)
        return replace(plan, chunk=next(chunks))

    def plan_again(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        fleet.cluster.planning._passes.clear()

    plain = make("llama")
    expected = train(plain, OPTIMIZERS["adamw"](plain.parameters()))
    with InProcess([ROOMY] * 3, arrange=arrange) as fleet:
        lease = fleet.cluster.lease
        monkeypatch.setattr(fleet.cluster, "lease", lambda *given: begun.append(given) or lease(*given))
        model = distribute(make("llama"), fleet.cluster, offload="always", grain="resident")
        losses = train(model, OPTIMIZERS["adamw"](model.parameters()), after_step=plan_again)
        undistribute(model)
    assert losses == pytest.approx(expected, abs=1e-4)
    assert len(begun) == 1
    check_same(model, plain)


def test_a_log_that_cannot_be_written_ends_leases_and_changes_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self: BoundaryLog, *_: object) -> None:
        raise LogFullError("no space left")

    monkeypatch.setattr(BoundaryLog, "add_pass", no_room)
    told = Told()
    compare(told, passes=2)
    assert told.has("no space left")


def test_adapters_that_devices_keep_train_the_same() -> None:
    from peft import LoraConfig, get_peft_model

    def lora(family: str) -> nn.Module:
        torch.manual_seed(2)
        model: Any = get_peft_model(make(family), LoraConfig(r=3, target_modules=["q_proj", "v_proj", "up_proj"]))  # type: ignore[arg-type]
        return model

    adapters = sum(one.requires_grad for one in lora("llama").parameters())
    assert compare(Told(), make=lora) == adapters > 0

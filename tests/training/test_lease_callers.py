"""Loops that leases were not made for: the same training all the same, or a clear sentence."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoders import make, tokens
from tests.support.doomed import Moment
from tests.support.in_process import ROOMY, InProcess
from tests.support.leased_training import OPTIMIZERS, Act, Told, compare, leased_count, on_devices, train
from tests.support.plans import leased
from torch import nn, optim

from cleave.errors import CleaveError
from cleave.train.offload import decoder as stack
from cleave.train.offload.boundary_log import BoundaryLog, LogFullError
from cleave.train.offload.distribute import distribute, undistribute
from cleave.train.offload.lease_recovery import Regaining
from cleave.train.offload.leased_tensors import LeasedParameter


def at(step: int, act: Callable[[nn.Module, optim.Optimizer], None]) -> Act:
    def acts(now: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        if now == step:
            act(model, optimizer)

    return acts


@contextmanager
def leasing(told: Told, optimizer: str = "adamw", **options: Any) -> Iterator[tuple[InProcess, Any, optim.Optimizer]]:
    with on_devices(told, **options) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", tell=told, grain="resident")
        own = OPTIMIZERS[optimizer](model.parameters())
        stack.know(model, own)
        yield fleet, model, own
        undistribute(model)


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize(
    "read",
    [
        lambda gradient: gradient.numpy(),
        lambda gradient: gradient.tolist(),
        np.asarray,
        copy.deepcopy,
        lambda gradient: torch.save(gradient, io.BytesIO()),
        lambda gradient: gradient.untyped_storage(),
    ],
    ids=["numpy", "tolist", "asarray", "deepcopy", "save", "storage"],
)
def test_gradients_can_be_read_in_ways_that_torch_does_not_dispatch(read: Callable[[Any], Any]) -> None:
    def act(model: nn.Module, optimizer: optim.Optimizer) -> None:
        for one in model.parameters():
            assert read(one.grad) is not None or read is not np.asarray

    assert compare(Told(), after_backward=at(2, act)) > 0


def test_a_gradient_read_as_numpy_has_its_numbers() -> None:
    plain, batch = make("llama"), tokens(0, 3)
    plain(input_ids=batch, labels=batch).loss.backward()
    with leasing(Told()) as (_, model, _own):
        model(input_ids=batch, labels=batch).loss.backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert other.grad is not None
            np.testing.assert_allclose(one.grad.numpy(), other.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_gradient_that_was_cleared_has_no_norm_but_says_why() -> None:
    with leasing(Told()) as (_, model, optimizer):
        kept: list[torch.Tensor] = []
        for step in range(2):
            optimizer.zero_grad()
            batch = tokens(step, 3)
            model(input_ids=batch, labels=batch).loss.backward()
            kept.append(next(one.grad for one in model.parameters() if isinstance(one, LeasedParameter)))
        with pytest.raises(CleaveError, match="cleared"):
            torch.linalg.vector_norm(kept[0])


def test_a_loss_of_factor_zero_gives_zeros() -> None:
    def no_loss(model: nn.Module, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad()
        batch = tokens(55, 2)
        (0 * model(input_ids=batch, labels=batch).loss).backward()

    assert compare(Told(), after_backward=at(2, no_loss)) > 0


def test_zeros_are_replayed_as_zeros() -> None:
    def no_loss(model: nn.Module, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad()
        batch = tokens(55, 2)
        (0 * model(input_ids=batch, labels=batch).loss).backward()

    told = Told()
    compare(told, after_backward=at(1, no_loss), dooms={1: Moment("update", "told", 3)})
    assert told.has("recovered")


# ------------------------------------------------------------------------------------------------ optimizers


def _without_momentum(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = group["dampening"] = 0


def _with_momentum(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.9


def _without_states(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.state.clear()


def _beyond_devices(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["eps"] = 1e12


@pytest.mark.parametrize(
    ("optimizer", "act"),
    [
        ("momentum", _without_momentum),
        ("sgd", _with_momentum),
        ("adamw", _without_states),
        ("adamw", _beyond_devices),
    ],
)
def test_an_optimizer_that_changes_its_ways_is_followed(optimizer: str, act: Any) -> None:
    assert compare(Told(), after_step=at(2, act), optimizer=optimizer) > 0


def _clip_before(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 1e-3))


def _clear_after(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())


@pytest.mark.parametrize("act", [_clip_before, _clear_after])
def test_hooks_on_steps_see_every_gradient(act: Any) -> None:
    told = Told()
    compare(told, after_step=at(1, act), clip=0)
    assert told.has("hooks")


def test_a_device_that_leaves_before_the_first_step_leaves_momentum_as_it_was() -> None:
    compare(Told(), dooms={1: Moment("hold", "told", 0)}, optimizer="momentum")


def test_several_optimizers_of_one_stack_run_here_and_that_is_said() -> None:
    told = Told()
    with on_devices(told) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", tell=told, grain="resident")
        parameters = list(model.parameters())
        both = optim.AdamW(parameters[::2], lr=1e-2), optim.SGD(parameters[1::2], lr=1e-2)
        for step in range(2):
            batch = tokens(step, 3)
            model(input_ids=batch, labels=batch).loss.backward()
            for one in both:
                one.step()
                one.zero_grad()
        assert leased_count(model) == 0
        undistribute(model)
    assert told.has("2 optimizers")


def test_parameters_that_join_an_optimizer_are_leased_too() -> None:
    with on_devices(Told()) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", grain="resident")
        parameters = list(model.parameters())
        optimizer = optim.SGD(parameters[:-6], lr=1e-2)
        counts: list[int] = []
        for step in range(5):
            optimizer.zero_grad()
            batch = tokens(step, 3)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            counts.append(leased_count(model))
            if step == 1:
                for one in parameters:
                    one.grad = None
                optimizer.add_param_group({"params": parameters[-6:]})
        undistribute(model)
    assert counts[-1] > counts[1] > 0


def test_weights_in_16_bits_beside_leased_ones_train_the_same() -> None:
    def mixed(family: Any) -> nn.Module:
        model: Any = make(family)
        model.model.layers[0].input_layernorm.bfloat16()
        return model

    assert compare(Told(), make=mixed, tolerance=2e-2) > 0


# ------------------------------------------------------------------------------------------------ giving up


def _read_gradients(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    for one in model.parameters():
        assert one.grad is not None
        assert one.grad.abs().max() >= 0


def _one_more_pass(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    batch = tokens(step + 50, 2)
    (3 * model(input_ids=batch, labels=batch).loss).backward()


def _save(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    assert model.state_dict()


def _run_in_vain(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    batch = tokens(step + 50, 2)
    assert model(input_ids=batch, labels=batch).loss.item() > 0


@pytest.mark.parametrize(
    "acts",
    [
        {"after_backward": _read_gradients},
        {"after_backward": _one_more_pass},
        {"after_step": _save},
        {"after_step": _run_in_vain},
    ],
)
def test_what_fetches_or_ends_leases_in_every_step_gives_them_up_and_says_why(acts: dict[str, Act]) -> None:
    told, counts, acts = Told(), list[int](), dict(acts)
    act = acts.pop("after_step", lambda step, model, optimizer: None)

    def after_step(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        counts.append(leased_count(model))
        act(step, model, optimizer)

    compare(told, steps=7, after_step=after_step, **acts)
    assert told.has("the optimizer runs on the server from now on")
    assert counts[-1] == 0


def test_closures_give_leases_up_and_that_is_said() -> None:
    def losses(model: nn.Module, optimizer: optim.Optimizer) -> list[float]:
        found: list[float] = []

        def closure(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            found.append(loss.item())
            return loss

        for step in range(7):
            batch = tokens(step, 3)
            optimizer.step(lambda batch=batch: closure(batch))  # type: ignore[misc]
        return found

    plain, told = make("llama"), Told()
    expected = losses(plain, OPTIMIZERS["adamw"](plain.parameters()))
    with leasing(told) as (_, model, optimizer):
        assert losses(model, optimizer) == pytest.approx(expected, abs=1e-4)
        assert leased_count(model) == 0
    assert told.has("calls the model again")


# ------------------------------------------------------------------------------------------------ the log


def _full_in(calls: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the log have no room for passes with these numbers, from 1."""
    add, count = BoundaryLog.add_pass, [0]

    def add_pass(self: BoundaryLog, *args: Any) -> None:
        count[0] += 1
        if count[0] in calls:
            raise LogFullError("no space left")
        add(self, *args)

    monkeypatch.setattr(BoundaryLog, "add_pass", add_pass)


@pytest.mark.parametrize("calls", [{4}, {4, 5}, {3, 4}])
def test_passes_that_the_log_has_no_room_for_keep_their_gradients(
    calls: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _full_in(calls, monkeypatch)
    compare(Told(), passes=2, dooms={1: Moment("collect", "told", 1)})


def test_a_full_log_and_passes_with_several_factors_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more_pass(model: nn.Module, optimizer: optim.Optimizer) -> None:
        batch = tokens(55, 2)
        (3 * model(input_ids=batch, labels=batch).loss).backward()

    _full_in({4, 5}, monkeypatch)
    compare(Told(), after_backward=at(2, one_more_pass), clip=0, optimizer="sgd")


def test_what_this_process_steps_is_logged_after_another_plan_too() -> None:
    """A shard that gets a sublayer without leases: its weights change here, and a replay needs them as they were."""
    layouts = [leased((1, 1, 5))]

    def hooked(model: Any) -> nn.Module:
        for one in model.model.layers[0].mlp.parameters():
            one.register_hook(lambda gradient: gradient)
        model.model.layers[0].post_attention_layernorm.weight.register_hook(lambda gradient: gradient)
        found: nn.Module = model
        return found

    def change(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        if step == 1:
            layouts.append(leased((2, 1, 4)))
            fleet.cluster.planning._passes.clear()

    plain, told = hooked(make("llama")), Told()
    expected = train(plain, OPTIMIZERS["sgd"](plain.parameters()), steps=7)
    dooms = {0: Moment("update", "told", 5)}
    with InProcess([ROOMY] * 3, arrange=lambda problem, **_: layouts[-1](problem), listener=told, dooms=dooms) as fleet:
        model = distribute(hooked(make("llama")), fleet.cluster, offload="always", tell=told, grain="resident")
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        stack.know(model, optimizer)
        assert train(model, optimizer, steps=7, after_step=change) == pytest.approx(expected, abs=1e-5)
        undistribute(model)
    assert told.has("recovered")


# ------------------------------------------------------------------------------------------------ interruptions


def test_a_recovery_that_is_interrupted_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops training while a lost stage is trained again, and then saves, gets current weights."""
    plain, updates, was_interrupted = make("llama"), Regaining._updates, [False]

    def interrupted(self: Regaining, *args: Any) -> Iterator[Any]:
        for number, future in enumerate(updates(self, *args)):
            if number == 2 and not was_interrupted[0]:
                was_interrupted[0] = True
                raise KeyboardInterrupt
            yield future

    monkeypatch.setattr(Regaining, "_updates", interrupted)
    expected = OPTIMIZERS["adamw"](plain.parameters())
    train(plain, expected, steps=3)
    with leasing(Told(), dooms={1: Moment("update", "returned", 2)}) as (_, model, optimizer):
        train(model, optimizer, steps=3)
        with pytest.raises(KeyboardInterrupt):
            model.state_dict()
        saved = model.state_dict()
        assert was_interrupted[0]
        for name, one in plain.state_dict().items():
            torch.testing.assert_close(saved[name], one, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------ numbers


def test_training_that_diverges_ends_in_nan_as_in_plain_torch() -> None:
    def explode(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 1e9 if step > 0 else 0.0

    plain = make("llama")
    expected = train(plain, OPTIMIZERS["sgd"](plain.parameters()), after_backward=explode)
    assert np.isnan(expected[-1])
    with leasing(Told(), "sgd") as (_, model, own):
        losses = train(model, own, after_backward=explode)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)

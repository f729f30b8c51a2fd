"""Laws of updates on a device: step by step what torch.optim does, on both kernels, whatever the bands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cleave.core.model.batch import Matrix
from cleave.core.model.update_rule import Adam, Rule, Sgd, states
from cleave.device.kernels import Kernel, NumpyKernel, TorchKernel
from cleave.device.programs.optimizer import Step, square_sum, update

ROWS, COLS, STEPS = 13, 37, 20
CLOSE = 1e-6
"""Relative to the largest entry, after all steps."""
_BETAS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

RULES: dict[str, tuple[Callable[[int], Rule], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (lambda step: Sgd(rate=0.1), torch.optim.SGD, {"lr": 0.1}),
    "sgd, decay, ascent": (
        lambda step: Sgd(rate=0.1, weight_decay=0.02, is_ascent=True),
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.02, "maximize": True},
    ),
    "momentum": (
        lambda step: Sgd(rate=0.1, momentum=0.9, dampening=0.3, weight_decay=0.02, is_first=step == 1),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
    ),
    "nesterov": (
        lambda step: Sgd(rate=0.1, momentum=0.9, weight_decay=0.02, is_nesterov=True, is_first=step == 1),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02, "nesterov": True},
    ),
    "adam": (lambda step: Adam(rate=0.01, step=step, **_BETAS), torch.optim.Adam, {"lr": 0.01}),
    "adam, decay": (
        lambda step: Adam(rate=0.01, step=step, weight_decay=0.1, **_BETAS),
        torch.optim.Adam,
        {"lr": 0.01, "weight_decay": 0.1},
    ),
    "adam, short memory, ascent": (
        lambda step: Adam(rate=0.01, step=step, beta1=0.3, beta2=0.8, eps=1e-3, is_ascent=True),
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.3, 0.8), "eps": 1e-3, "maximize": True},
    ),
    "adamw": (
        lambda step: Adam(rate=0.01, step=step, weight_decay=0.1, is_decoupled=True, **_BETAS),
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1},
    ),
}


def kernels(elements: int) -> list[Kernel]:
    """Both kernels, in bands of so many elements."""
    made: list[Kernel] = [NumpyKernel(), TorchKernel("cpu")]
    for kernel in made:
        kernel.tile_elements = elements
    return made


def arrays(kernel: Kernel, matrix: Matrix) -> Any:
    return torch.from_numpy(matrix.copy()) if isinstance(kernel, TorchKernel) else matrix.copy()


def gradients(scale: float) -> list[Matrix]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal((ROWS, COLS), dtype=np.float32) * np.float32(scale) for _ in range(STEPS)]


def by_torch(weight: Matrix, given: list[Matrix], scale: float, kind: Any, settings: dict[str, Any]) -> list[Matrix]:
    """The weight and its states after all steps."""
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    optimizer = kind([parameter], **settings, foreach=False)
    for gradient in given:
        parameter.grad = torch.from_numpy(gradient) * scale
        optimizer.step()
    names = [name for name in ("momentum_buffer", "exp_avg", "exp_avg_sq") if name in optimizer.state[parameter]]
    kept = [optimizer.state[parameter][name] for name in names]
    return [tensor.detach().numpy() for tensor in (parameter, *(each for each in kept if each is not None))]


def by_device(
    kernel: Kernel, weight: Matrix, given: list[Matrix], scale: float, rule: Callable[[int], Rule]
) -> list[Matrix]:
    held = arrays(kernel, weight)
    kept = tuple(arrays(kernel, np.zeros_like(weight)) for _ in range(states(rule(1))))
    for number, gradient in enumerate(given, 1):
        array = arrays(kernel, gradient)
        update(kernel, rule(number), scale, [Step(weight=held, gradient=array, states=kept)])
        np.testing.assert_array_equal(np.asarray(array), gradient)
    return [np.asarray(each) for each in (held, *kept)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_weights_and_states_follow_torch(name: str, scale: float) -> None:
    rule, kind, settings = RULES[name]
    weight = np.random.default_rng(0).standard_normal((ROWS, COLS), dtype=np.float32)
    expected = by_torch(weight, gradients(1.0), scale, kind, settings)
    for kernel in kernels(1 << 18):
        found = by_device(kernel, weight, gradients(1.0), scale, rule)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            if isinstance(kernel, TorchKernel):
                np.testing.assert_array_equal(ours, theirs)
            else:
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE * float(np.abs(theirs).max()))


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_bands_change_nothing(name: str) -> None:
    rule, *_ = RULES[name]
    weight = np.random.default_rng(0).standard_normal((ROWS, COLS), dtype=np.float32)
    for whole, cut in zip(kernels(1 << 18), kernels(64), strict=True):
        expected = by_device(whole, weight, gradients(1.0), 0.5, rule)
        for ours, theirs in zip(by_device(cut, weight, gradients(1.0), 0.5, rule), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_several_weights_of_different_shapes_are_updated_as_one_by_one() -> None:
    rng, rule = np.random.default_rng(2), Adam(rate=0.1, step=3, **_BETAS)
    shapes = [(1, 1), (5, 7), (40, 3)]
    for kernel in kernels(16):
        given = [[rng.random(shape, dtype=np.float32) for _ in range(4)] for shape in shapes]
        alone, together = ([[arrays(kernel, matrix) for matrix in each] for each in given] for _ in range(2))
        for each in alone:
            update(kernel, rule, 1.0, [step_of(each)])
        update(kernel, rule, 1.0, [step_of(each) for each in together])
        for one, other in zip(alone, together, strict=True):
            for ours, theirs in zip(one, other, strict=True):
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def step_of(each: list[Any]) -> Step:
    weight, gradient, *kept = each
    return Step(weight=weight, gradient=gradient, states=tuple(kept))


def test_the_first_step_of_momentum_ignores_what_was_in_the_buffer() -> None:
    for kernel in kernels(16):
        weight, gradient, buffer = (arrays(kernel, np.full((2, 3), x, dtype=np.float32)) for x in (1.0, 2.0, np.nan))
        rule = Sgd(rate=0.5, momentum=0.9, is_first=True)
        update(kernel, rule, 0.25, [Step(weight=weight, gradient=gradient, states=(buffer,))])
        np.testing.assert_array_equal(np.asarray(buffer), np.full((2, 3), 0.5))
        np.testing.assert_array_equal(np.asarray(weight), np.full((2, 3), 0.75))


def test_a_mean_without_memory_is_the_gradient_to_the_last_bit() -> None:
    for kernel in kernels(16):
        mean, end = (arrays(kernel, np.full((2, 3), x, dtype=np.float32)) for x in (1e8, 1e-3))
        kernel.interpolate(mean, end, 1.0, kernel.allocate(2, 3))
        np.testing.assert_array_equal(np.asarray(mean), np.asarray(end))


def test_nonfinite_gradients_stay_nonfinite_and_warn_nobody() -> None:
    with np.errstate(all="raise"):
        for kernel in kernels(16):
            weight, mean, square = (arrays(kernel, np.ones((1, 3), dtype=np.float32)) for _ in range(3))
            gradient = arrays(kernel, np.array([[np.inf, np.nan, 3e38]], dtype=np.float32))
            step = Step(weight=weight, gradient=gradient, states=(mean, square))
            update(kernel, Adam(rate=0.1, step=1, **_BETAS), 1.0, [step])
            assert np.isnan(np.asarray(weight)[0, :2]).all()


def test_a_lack_of_memory_changes_nothing() -> None:
    class Full(NumpyKernel):
        def allocate(self, rows: int, cols: int) -> Any:
            raise MemoryError

    weight, gradient = np.ones((2, 3), dtype=np.float32), np.ones((2, 3), dtype=np.float32)
    with pytest.raises(MemoryError):
        update(Full(), Sgd(rate=0.1), 1.0, [Step(weight=weight, gradient=gradient, states=())])
    np.testing.assert_array_equal(weight, 1)


@pytest.mark.parametrize("elements", [64, 1 << 18])
def test_a_sum_of_squares_is_exact_to_the_precision_of_its_result(elements: int) -> None:
    """Many small numbers beside a large one: added one by one in fp32 they would be lost."""
    matrix = np.full((1000, 401), 1e-3, dtype=np.float32)
    matrix[0, 0] = 30.0
    expected = float((matrix.astype(np.float64) ** 2).sum())
    for kernel in kernels(elements):
        assert square_sum(kernel, arrays(kernel, matrix)) == pytest.approx(expected, rel=2e-7)

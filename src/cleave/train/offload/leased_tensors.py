# pyright: standard
"""Stand-ins for tensors whose numbers are on devices: parameters and states that notice when they are read, gradients.

After an update this process's copies of a leased parameter and its optimizer states are old. Whoever reads one, in
whatever way, must see the current numbers, so its class is swapped for one that asks its keeper first. A gradient is a
tensor without numbers that knows its norm and can be scaled, which is all that clipping needs; whatever else is done to
it brings the numbers here and ends the lease. `leases.py` is the keeper.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from cleave.errors import CleaveError

_aten = torch.ops.aten


class Keeper(Protocol):
    def refresh(self, why: str) -> None:
        """Bring this process's copies of all leased parameters up to date."""
        ...

    def end(self, why: str) -> None:
        """End the lease: parameters, states and gradients are plain tensors of this process again."""
        ...

    def norm(self, gradient: LeasedGradient) -> float | None:
        """Return the norm of a gradient's numbers on the device; None if none has them: they may be here then."""
        ...

    @property
    def is_saving(self) -> bool:
        """Whether weights are being saved: views of them are read then, not written."""
        ...


# ------------------------------------------------------------------------------------------------ parameters and states


def _getters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name))


_HARMLESS = {
    *_getters("shape", "dtype", "device", "grad", "requires_grad", "is_leaf", "layout", "ndim", "grad_fn", "names"),
    *_getters("is_sparse", "is_meta", "is_cuda", "is_quantized", "retains_grad", "_version", "output_nr", "is_cpu"),
    *_getters("is_mps", "is_xpu", "is_nested", "is_mkldnn", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *_getters("is_vulkan", "is_ipu", "is_maia", "is_xla", "is_mtia", "is_sparse_csr", "itemsize", "nbytes", "is_hpu"),
    torch.Tensor.grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.grad.__delete__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""What can be done to a tensor without its numbers."""


class LeasedParameter(nn.Parameter):
    """A parameter whose numbers are on a device."""

    _cleave_keeper: Keeper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _with_current(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        self._cleave_keeper.end("the model was copied")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._cleave_keeper.end("the model was copied")
        return self.__reduce_ex__(protocol)


class LeasedState(torch.Tensor):
    """An optimizer state whose numbers are on a device. Views of it are for reading: `state_dict` gives them away."""

    _cleave_keeper: Keeper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _with_current(func, args, kwargs or {})

    def _plain(self) -> torch.Tensor:
        self._cleave_keeper.refresh("an optimizer state was copied")
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


def _with_current(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch after bringing what it reads up to date; end the lease if something may be written."""
    if func in _HARMLESS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    mine = [one for one in tensors if isinstance(one, LeasedParameter | LeasedState)]
    if any(one.numel() == 0 for one in tensors):  # as in the modules that a stack on devices has passed by
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.numel() == 0:
            return result
    keepers = {id(one._cleave_keeper): one._cleave_keeper for one in mine}
    name = getattr(func, "__name__", func)
    for keeper in keepers.values():
        keeper.refresh(f"a weight or state was read ({name})")
    with torch._C.DisableTorchFunctionSubclass():
        before = [one._version for one in mine]
        result = func(*args, **kwargs)
        is_written = before != [one._version for one in mine]
        is_shared = _shares_memory(result, [one for one in mine if isinstance(one, LeasedParameter)])
    for keeper in keepers.values():
        if is_written or (is_shared and not keeper.is_saving):
            keeper.end(f"a weight or state may have been changed ({name})")
    return result


def _shares_memory(result: Any, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether numbers could be changed through a result: it is a view, or no tensor at all, such as an address."""
    theirs = {one.untyped_storage().data_ptr() for one in parameters}
    if not theirs:
        return False
    for one in tree_flatten(result)[0]:
        if isinstance(one, torch.Tensor):
            if one.layout is torch.strided and one.untyped_storage().data_ptr() in theirs:
                return True
        elif not isinstance(one, bool | float | str | torch.dtype | torch.device | type(None)):
            return True
    return False


def lease(tensor: torch.Tensor, keeper: Keeper) -> None:
    """Make a parameter or a state ask its keeper from now on."""
    tensor.__class__ = LeasedParameter if isinstance(tensor, nn.Parameter) else LeasedState  # type: ignore[assignment]
    tensor._cleave_keeper = keeper  # type: ignore[attr-defined]


def release(tensor: torch.Tensor) -> None:
    if isinstance(tensor, LeasedParameter | LeasedState):
        tensor.__class__ = nn.Parameter if isinstance(tensor, LeasedParameter) else torch.Tensor  # type: ignore[assignment]
        del tensor._cleave_keeper


# ------------------------------------------------------------------------------------------------ gradients


class LeasedGradient(torch.Tensor):
    """The gradient of a leased parameter: without numbers until something reads them."""

    keeper: Keeper
    number: int
    factor: float
    """What the numbers on the device are to be multiplied by."""
    numbers: torch.Tensor | None
    """The gradient itself, once it is here."""

    @staticmethod
    def __new__(cls, keeper: Keeper, number: int, like: torch.Tensor, factor: float) -> LeasedGradient:
        found = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        found.keeper, found.number, found.factor, found.numbers = keeper, number, factor, None
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match func.overloadpacket:
            case _aten.linalg_vector_norm if _is_plain_norm(args, kwargs):
                return args[0]._norm()
            case _aten._foreach_norm if _is_plain_norm(args, kwargs):
                return [one._norm() if isinstance(one, cls) else torch.linalg.vector_norm(one) for one in args[0]]
            case _aten.mul_ if (factor := _scalar(args[1])) is not None:
                return _scale(args[0], factor)
            case _aten.div_ if (factor := _scalar(args[1])) is not None and factor:
                return _scale(args[0], 1.0 / factor)
            case _aten._foreach_mul_ if (factor := _scalar(args[1])) is not None:
                for one in args[0]:
                    _scale(one, factor) if isinstance(one, cls) else one.mul_(factor)
                return None
            case _aten.detach | _aten.detach_ | _aten.alias:
                return args[0]
        return func(*tree_map(_fetched, args), **tree_map(_fetched, kwargs))

    def _norm(self) -> torch.Tensor:
        norm = self.keeper.norm(self) if self.numbers is None else None
        if norm is None:
            return torch.linalg.vector_norm(_fetched(self))
        return torch.tensor(abs(self.factor) * norm, dtype=self.dtype)

    # What torch does without a dispatch.

    def numpy(self, **options: Any) -> Any:
        return _fetched(self).numpy(**options)

    def tolist(self) -> Any:
        return _fetched(self).tolist()

    def data_ptr(self) -> int:
        return int(_fetched(self).data_ptr())

    def untyped_storage(self) -> Any:
        return _fetched(self).untyped_storage()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_fetched(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _fetched(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LeasedGradient({tuple(self.shape)}, on a device)" if self.numbers is None else repr(self.numbers)


def _is_plain_norm(args: Any, kwargs: Any) -> bool:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return order == 2 and all(one is None or one is False or one == [] for one in (*args[2:], *_others(kwargs)))


def _others(kwargs: Any) -> list[Any]:
    return [value for name, value in kwargs.items() if name != "ord"]


def _scalar(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return None if value.numel() != 1 or isinstance(value, LeasedGradient) else float(value)
    return float(value) if isinstance(value, int | float) else None


def _scale(gradient: Any, factor: float) -> Any:
    if gradient.numbers is not None:
        gradient.numbers.mul_(factor)
    else:
        gradient.factor *= factor
    return gradient


def _fetched(value: Any) -> Any:
    """Return the numbers of a gradient; anything else as it is."""
    if not isinstance(value, LeasedGradient):
        return value
    if value.numbers is None:
        value.keeper.end("a gradient was read between backward and the optimizer's step")
    if value.numbers is None:
        raise CleaveError(
            "this gradient is on no device any more: it was cleared, or left with its device after its step; clone a "
            "gradient that you need for longer"
        )
    return value.numbers

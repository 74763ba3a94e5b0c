"""A device that is not the CPU, for a machine that has no other: its tensors hold their numbers in main memory, and are
as strict about meeting tensors of the CPU as CUDA's are.

`with other_device():` inside, `OTHER` is a device. What CUDA refuses is refused: operations of tensors of both kinds (a
CPU scalar of no dimension may meet anything), a generator of the CPU that fills a tensor of the device, `numpy()` of
one, a CPU tensor indexed by one. It knows no memory, no streams, no kernels, and
torch.utils.checkpoint's backward ends the process there. Made for a process of its own: torch keeps
such a device for good, and a library that asks torch for an accelerator would find this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "other"
CPU = torch.device("cpu")
aten: Any = torch.ops.aten
PUTS = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
MEETINGS = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, *PUTS}
"""Operations that take tensors of both kinds, on CUDA too; indexing under `_check_index`."""


class _Stream:
    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Module(_DummyBackendModule):
    """What torch looks for in `torch.<device>`."""

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...


_setup_privateuseone_for_python_backend(NAME, _Module())
OTHER = torch.device(f"{NAME}:0")


class OtherTensor(Tensor):
    """A tensor on the device; `near` has its numbers."""

    near: Tensor
    made = 0
    """How many there have been."""

    @staticmethod
    def __new__(cls, near: Tensor) -> OtherTensor:
        assert not isinstance(near, OtherTensor)
        made = Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=OTHER,
        )
        made.near = near
        OtherTensor.made += 1
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def tolist(self) -> Any:
        return self.near.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy: copy it to the CPU first")

    def __repr__(self, **kwargs: Any) -> str:
        return f"OtherTensor({self.near})"


class _Mode(TorchDispatchMode):
    """Sees the operations that take no tensor of the device and make one: zeros, arange, a copy from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    has_other = any(isinstance(x, OtherTensor) for x in tensors)
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if not has_other and (asked is None or asked.type != NAME):
        return func(*args, **kwargs)
    if has_other and func not in MEETINGS and any(x.dim() and not isinstance(x, OtherTensor) for x in tensors):
        shapes = [(x.device.type, tuple(x.shape)) for x in tensors]
        raise RuntimeError(f"expected all tensors to be on the same device: {func} of {shapes}")
    _check_index(func, args)
    _check_generator(func, args, kwargs, asked.type if asked is not None else NAME)
    if func not in MEETINGS and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    ):
        whole = func.decompose(*args, **kwargs)
        if whole is not NotImplemented:
            return whole
    near_args, near_kwargs = tree_map_only(OtherTensor, lambda x: x.near, (args, dict(kwargs)))
    if asked is not None:
        near_kwargs["device"] = CPU
    near_kwargs.pop("pin_memory", None)
    if func is aten.histc.default:  # CUDA takes integers, the CPU does not
        near_args = (near_args[0].float(), *near_args[1:])
    found = func(*near_args, **near_kwargs)
    if func is aten.copy_.default:
        return args[0]
    if asked is not None and asked.type != NAME:
        return found
    made = tree_map_only(Tensor, OtherTensor, found)
    return return_and_correct_aliasing(func, args, dict(kwargs), made) if has_other else made


def _check_index(func: Any, args: Sequence[Any]) -> None:
    if func not in PUTS and func is not aten.index.Tensor:
        return
    if not isinstance(args[0], OtherTensor) and any(isinstance(x, OtherTensor) for x in args[1]):
        raise RuntimeError("a tensor of the CPU is indexed by one of the device")
    if func in PUTS and isinstance(args[0], OtherTensor) and args[2].dim() and not isinstance(args[2], OtherTensor):
        raise RuntimeError("values of the CPU are put into a tensor of the device")


def _check_generator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
    if found and found[0].device.type != where:
        raise RuntimeError(f"expected a generator of {where} but found one of {found[0].device}: {func}")


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OtherTensor(torch.empty_strided(size, stride, dtype=dtype, device=CPU))


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OtherTensor(torch.empty(size, dtype=dtype, device=CPU))


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    source, near = (x.near if isinstance(x, OtherTensor) else x for x in (source, to))
    near.copy_(source)
    return to


# Autograd's own threads do not run under the mode: what they make goes through these.
_OPS = torch.library.Library("aten", "IMPL")
for _name, _kernel in (("empty_strided", _empty_strided), ("empty.memory_format", _empty), ("_copy_from", _copy_from)):
    _OPS.impl(_name, _kernel, "PrivateUse1")
_REST = torch.library.Library("_", "IMPL")
_REST.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")


@contextlib.contextmanager
def other_device() -> Iterator[None]:
    """Inside, tensors can be made on OTHER, and modules moved to it."""
    plain = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        # torch.tensor fills its result where no dispatch reaches.
        where = data.device if device is None and isinstance(data, Tensor) else device
        if where is None or torch.device(where).type != NAME:
            return plain(tree_map_only(OtherTensor, lambda x: x.near, data), *args, device=device, **kwargs)
        return plain(tree_map_only(OtherTensor, lambda x: x.near, data), *args, device=CPU, **kwargs).to(where)

    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    torch.tensor = tensor
    try:
        with _Mode():
            yield
    finally:
        torch.tensor = plain
        torch.__future__.set_swap_module_params_on_conversion(swap)

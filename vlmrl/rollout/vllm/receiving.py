"""Tensors out of the messages of any transport, in the process that loads them into its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmrl.dist.engine_isolation import BroadcastGroup
from vlmrl.errors import EngineError
from vlmrl.rollout.vllm import gpu_handles, wire
from vlmrl.rollout.vllm.kept_parts import Region, cut, paste

open_tensor = gpu_handles.open_tensor
"""Function that opens a tensor that the trainer lends."""


class Receiver:
    """Receiving end of the transports for one model; it lives as long as the model.

    Attributes:
        kept: name -> the only numbers of that tensor that the model keeps; None = not known yet.
    """

    def __init__(self) -> None:
        self.kept: Mapping[str, Sequence[Region]] | None = None
        self._group: BroadcastGroup | None = None

    def tensors(
        self, messages: Iterator[tuple[dict[str, Any], list[bytearray]]], reply: Callable[[dict[str, Any]], Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each tensor that is sent, lent or broadcast.

        Args:
            messages: of one transfer.
            reply: sends an answer to the trainer.
        Raises: EngineError when a message is none of these.
        """
        for header, blobs in messages:
            if "tensor" in header:
                yield wire.unpack_tensor(header, blobs)
            elif "lent" in header:
                copies = [(e["tensor"], self._copy_of(e)) for e in header["lent"]]
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # after the answer the trainer may overwrite its tensors
                reply({"taken": True})
                yield from copies
            elif "broadcast" in header and self._group is not None:
                reply({"taken": True})
                for e in header["broadcast"]:
                    tensor = torch.empty(e["shape"], dtype=wire.DTYPES[e["dtype"]], device=self._group.device)
                    self._group.broadcast(tensor)
                    yield e["tensor"], tensor
            elif "join" in header:
                join = header["join"]
                self._group = BroadcastGroup(Path(join["store"]), join["rank"], join["size"], join["device"])
                reply({"taken": True})
            else:
                raise EngineError(f"a message with weights has the unexpected fields {', '.join(sorted(header))}")

    def _copy_of(self, entry: Mapping[str, Any]) -> Tensor:
        """Return a copy of a lent tensor on this process's own device; NaN where the model keeps nothing."""
        [handle] = entry["handles"]
        lent = open_tensor(handle, entry["shape"], wire.DTYPES[entry["dtype"]])
        own = torch.device("cuda", torch.cuda.current_device()) if lent.is_cuda else lent.device
        regions = (self.kept or {}).get(entry["tensor"])
        if regions is None:
            return lent.to(own, copy=True)
        return paste((piece.to(own) for piece in cut(lent, regions)), regions, entry["shape"], lent.dtype)

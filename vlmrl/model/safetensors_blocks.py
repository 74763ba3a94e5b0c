"""Reader and writer of safetensors files, a block at a time, so that memory does not grow with the model.

A file consists of the header's length (8 bytes, little-endian), a JSON header (name -> dtype, shape, data_offsets) and
the data. Files that several ranks saved have one more entry under `__metadata__`: the offset of the file's part in the
whole tensor (torch.distributed.checkpoint's DCP_SHARDING_INFO). Blocks are read by position, not through a memory
mapping, because its pages would be counted as memory of this process. Stored weights are checked: they must have the
names and shapes of the model's configuration, and be finite.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmrl.errors import CheckpointError
from vlmrl.model.model_files import WEIGHTS_INDEX, read_header, stored_shapes
from vlmrl.untrusted import parse_json

BLOCK_BYTES = 1 << 25
"""Approximate size of a block of rows, in bytes. A single row may be larger."""
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorPiece:
    """Rectangular part of a tensor in a file.

    Args:
        position: position of its bytes in the file.
        offsets: index of its first element in the whole tensor, per dimension.
        shape: its own shape.
    """

    path: Path
    position: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """Tensor on disk: one piece, or several pieces that together cover it without overlap."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the first row, rows) in order, in blocks of about BLOCK_BYTES. Rows have their full width.

        A scalar is yielded as a single row.
        """
        shape = self.shape or (1,)
        step = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * self.dtype.itemsize))
        for start in range(0, shape[0], step):
            rows = self._rows(start, min(start + step, shape[0]))
            yield start, rows if self.shape else rows.reshape(())

    def whole(self) -> Tensor:
        """Return the whole tensor, in memory."""
        parts = [rows for _, rows in self.blocks()]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else torch.empty(self.shape, dtype=self.dtype)

    def rows(self, start: int, end: int) -> Tensor:
        """Return rows [start, end) in full width. A scalar has a single row."""
        rows = self._rows(start, end)
        return rows if self.shape else rows.reshape(())

    def _rows(self, start: int, end: int) -> Tensor:
        shape = self.shape or (1,)
        if len(self.pieces) == 1:
            return _read_rows(self.pieces[0], self.dtype, start, end)
        rows = torch.empty((end - start, *shape[1:]), dtype=self.dtype)
        for piece in self.pieces:
            first, last = max(start, piece.offsets[0]), min(end, piece.offsets[0] + piece.shape[0])
            if first < last:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offsets[1:], piece.shape[1:], strict=True))
                part = _read_rows(piece, self.dtype, first - piece.offsets[0], last - piece.offsets[0])
                rows[(slice(first - start, last - start), *box)] = part
        return rows


def read_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return name -> tensor for safetensors files. Parts from several ranks are joined. Only headers are read.

    Raises: CheckpointError that names a file that is cut short, damaged, or does not match the others.
    """
    parts_by_name: dict[str, list[tuple[torch.dtype, TensorPiece]]] = {}
    for path in files:
        for name, dtype, piece in _header(path):
            parts_by_name.setdefault(name, []).append((dtype, piece))
    return {name: _put_together(name, parts) for name, parts in parts_by_name.items()}


def _put_together(name: str, parts: list[tuple[torch.dtype, TensorPiece]]) -> StoredTensor:
    dtype, pieces = parts[0][0], tuple(sorted((p for _, p in parts), key=lambda p: p.offsets))
    where = ", ".join(sorted({p.path.name for p in pieces}))
    if any(d != dtype or len(p.shape) != len(pieces[0].shape) for d, p in parts):
        raise CheckpointError(
            f"the parts of {name} differ in dtype or number of dimensions", where=f"{pieces[0].path.parent}: {where}"
        )
    ends = [[o + n for o, n in zip(p.offsets, p.shape, strict=True)] for p in pieces]
    shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    overlap = any(_overlap(a, b) for i, a in enumerate(pieces) for b in pieces[:i])
    if overlap or sum(math.prod(p.shape) for p in pieces) != math.prod(shape):
        raise CheckpointError(
            f"the parts of {name} do not form a whole tensor {shape}",
            where=f"{pieces[0].path.parent}: {where}",
            hint="a shard is missing, or of another step; use another checkpoint of the run",
        )
    return StoredTensor(name, dtype, shape, pieces)


def _overlap(a: TensorPiece, b: TensorPiece) -> bool:
    sides = zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
    return all(max(x, y) < min(x + m, y + n) for x, m, y, n in sides)


def _header(path: Path) -> list[tuple[str, torch.dtype, TensorPiece]]:
    header, data = read_header(path)
    try:
        sharding = parse_json(header.pop("__metadata__", {}).get(SHARDING, "{}"))
        pieces = []
        for name, entry in header.items():
            shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            if last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} has {last - first} bytes, which does not match its shape")
            offsets = tuple(sharding[name][OFFSETS]) if sharding else (0,) * len(shape)
            pieces.append((name, dtype, TensorPiece(path, data + first, offsets, shape)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} is damaged: {error}", where=str(path)) from error
    return pieces


def _read_rows(piece: TensorPiece, dtype: torch.dtype, start: int, end: int) -> Tensor:
    """Return rows [start, end) of a piece. A row is contiguous in the file."""
    shape = piece.shape or (1,)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    buffer = torch.empty((end - start) * row_bytes, dtype=torch.uint8)
    view, position = buffer.numpy().data, piece.position + start * row_bytes
    with open(piece.path, "rb", buffering=0) as file:
        while len(view):
            count = os.preadv(file.fileno(), [view], position)
            if not count:
                raise CheckpointError(f"{piece.path.name} became shorter while it was read", where=str(piece.path))
            view, position = view[count:], position + count
    return buffer.view(dtype).view(end - start, *shape[1:])


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def split_shards(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Split specs, in order, into shards of at most `max_bytes`; a larger tensor gets a shard of its own."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.bytes
    return shards


def write_shards(
    folder: Path, specs: Sequence[TensorSpec], blocks: Callable[[str], Iterator[Tensor]], max_bytes: int
) -> dict[str, str]:
    """Write `model-0000k-of-0000n.safetensors` and their index as transformers reads them. Return name -> file.

    Args:
        blocks: function from a name to the tensor's values, in order, in pieces of any shape, in the dtype of its spec.
    """
    shards = split_shards(specs, max_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, blocks)
        weight_map |= dict.fromkeys((spec.name for spec in shard), name)
    total = {"total_parameters": sum(math.prod(s.shape) for s in specs), "total_size": sum(s.bytes for s in specs)}
    index = {"metadata": total, "weight_map": weight_map}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
    return weight_map


def _write_file(path: Path, specs: Sequence[TensorSpec], blocks: Callable[[str], Iterator[Tensor]]) -> None:
    # Dtypes with large items come first: then each tensor begins at a multiple of its item size, as mapping requires.
    ordered = sorted(specs, key=lambda s: -s.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for s in ordered:
        header[s.name] = {"dtype": DTYPE_NAMES[s.dtype], "shape": list(s.shape), "data_offsets": [end, end + s.bytes]}
        end += s.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for s in ordered:
            written = 0
            for block in blocks(s.name):
                if block.dtype != s.dtype:
                    raise ValueError(f"{s.name}: a block is {block.dtype}, the header says {s.dtype}")
                written += file.write(block.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            if written != s.bytes:
                raise ValueError(f"{s.name}: {written} bytes were written, the header says {s.bytes}")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a Hugging Face folder: those in its index, or `model.safetensors`.

    Raises: CheckpointError that names a missing file.
    """
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        names = ["model.safetensors"]
    else:
        try:
            weight_map: Mapping[str, str] = parse_json(index.read_text("utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{WEIGHTS_INDEX} cannot be read: {error}", where=str(folder)) from error
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{name} is missing", where=str(folder), hint="copy it again, or download it again")
    return [folder / name for name in names]


SHOWN = 3
"""Maximum number of weight names in an error message."""
HINT = "copy or download the folder again; check that all shards are there and belong to this model"


def refuse_incomplete(report: Mapping[str, Any], source: str) -> None:
    """Check that every weight of the model was in the files, with the right shape.

    Args:
        report: loading report of transformers (`output_loading_info`), which accounts for renamed and tied weights.
    Raises: CheckpointError with the first names of the weights for which this is not so.
    """
    if missing := sorted(report["missing_keys"]):
        message = f"the weights of `{source}` lack {len(missing):,} tensors of the model: {_listed(missing)}"
        raise CheckpointError(message, where=source, hint=HINT)
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, needed = mismatched[0]
        message = (
            f"{len(mismatched):,} weights of `{source}` have another shape than in its configuration: "
            f"{name} is {tuple(stored)}, not {tuple(needed)}"
        )
        raise CheckpointError(message, where=source, hint=HINT)


def refuse_non_finite(model: torch.nn.Module, source: str) -> None:
    """Raise a CheckpointError unless every floating-point weight is finite. One pass, without copies.

    Packed 4-bit weights are not checked, because they are bytes.
    """
    bad = [name for name, parameter in model.named_parameters() if not is_finite(parameter.detach())]
    if bad:
        raise non_finite(bad, source)


def non_finite(names: Collection[str], source: str) -> CheckpointError:
    """Return the error about weights that are not finite.

    Args:
        names: their names, in the model's order.
    """
    message = f"{len(names):,} weights of `{source}` hold NaN or infinity: {_listed(names)}"
    return CheckpointError(message, where=source, hint="use a checkpoint from before that, or copy the folder again")


def compare_stored(folder: Path, model: Any) -> None:
    """Compare the names and shapes in a folder's safetensors headers with a model on the meta device.

    transformers loads empty tensors with these names, so its rules for renamed and tied weights apply here too. Two
    cases are not compared: a folder without safetensors, which holds a configuration only (a checkpoint keeps its
    weights elsewhere), and weights that were stored quantized, which have other names and shapes.

    Raises: CheckpointError, see `refuse_incomplete`.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files or getattr(model.config, "quantization_config", None) is not None:
        return
    shapes = {name: shape for path in files for name, shape in stored_shapes(path).items()}
    stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    report = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=stored,
        device_map={"": "meta"},
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )[1]
    refuse_incomplete(report, str(folder))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers are finite. Tensors of bytes and integers are."""
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # both are NaN if any number is NaN
    return bool(low.isfinite() & high.isfinite())


def _listed(names: Collection[str]) -> str:
    return ", ".join(list(names)[:SHOWN]) + (" ..." if len(names) > SHOWN else "")

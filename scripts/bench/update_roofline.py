"""Time of a training update on a card, predicted from its counted operations, beside the measured time:

    python scripts/bench/update_roofline.py [--json] [--card "NVIDIA H100 80GB HBM3"] [--model Qwen2.5-VL-7B]
                                            [--groups 2] [--rank 0] [--only here|card] [--smoke]

`here`: an update is counted and predicted from rates that are measured on this machine, and the same update is
measured, uncompiled and compiled. This says how far predictions can be trusted. `card`: one packed row of TaxonRL's
shape (per group two images of 800 pixels, 300 tokens of text, 16 responses of 300 tokens) on a card that need not be
here, by its data sheet times the shares that kernels reach (`REACHED`), for each `model.gradient_checkpointing`.

Counted is each operation that the real modules run, forward and backward; for a card on tensors without storage. A
matrix product takes the longer of its FLOPs at the card's rate and its bytes at its bandwidth. Attention takes its
FLOPs by formula (flops.py beside this file; its backward pass computes the scores again: 2.5 times the forward's). All
else takes its bytes. Uncompiled, each operation reads and writes memory. In compiled layers, the operations between two
matrix products run as one: only what comes from outside is read, and only what is used outside is written.

MFU counts no operation twice: FLOPs by formula over the time and the dense bfloat16 peak. `kept` is what uncompiled
layers keep for the backward pass. Left out on a card: the optimizer's step, other ranks, waits for the CPU, and that
uncompiled layers compute some tensors again to keep less ("cheap" ones, a few passes over memory).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from flops import Flops, PassWork, training_flops
from gpu import PEAKS
from gpu_kernels import median_seconds
from gpu_world import GIB, Case, World, batches, make_items, make_model, shape_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vlmrl.model import attention
from vlmrl.model.memory import STEPS
from vlmrl.model.packing import TrainItem, make_row, pack, plan_row
from vlmrl.model.policy import Policy

SHEET_BANDWIDTH = {
    "NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA A100-SXM4-80GB": 2.039e12,
}  # fmt: skip
"""torch's name of a device -> bytes a second of its memory, by its data sheet."""
REACHED = {"products": 0.71, "attention": 0.33, "memory": 0.78}
"""Share of the data sheet that kernels reach: assumed, not measured. Large bfloat16 matrix products, FlashAttention 2
with heads of 128, copies."""
ATTENTION = ("flash_attention", "varlen_attn", "split_rows")
VIEWS = {
    "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unfold", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
"""Operations that touch no element."""
WAYS = {"uncompiled": False, "compiled": True}
BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products instead of two."""


@dataclass(frozen=True)
class Rates:
    """FLOPs a second of matrix products and of attention, and bytes a second of memory."""

    products: float
    attention: float
    memory: float


@dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
        part: "vision", "text" or "head".      phase: "forward", "again" (recomputed) or "backward".
        kind: "products", "attention" or "memory".      flops: of a product.
        reads, writes: storage -> bytes of it that are read, written.
    """

    part: str
    phase: str
    kind: str
    flops: float
    reads: dict[int, int]
    writes: dict[int, int]


class Count(TorchDispatchMode):
    """Mode that lists the operations of passes on a device, in order.

    Attributes:
        part: of the operations that follow.      operations: those so far.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.operations: list[Operation] = []
        self.part = "head"
        self.sizes: dict[int, int] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # keeps the keys of freed storages from being used again

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # an assertion of the model's code
        out = function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        outputs = [x for x in _tensors(out) if x.device.type == self.device.type]
        if name in VIEWS or not outputs:
            return out
        changed = [x for x, at in zip(args, function._schema.arguments, strict=False) if _is_changed(at)]
        counter = flop_registry.get(function._overloadpacket)
        attends = any(word in name for word in ATTENTION)
        flops = float(counter(*args, **kwargs, out_val=out)) if counter and not attends else 0.0
        kind = "attention" if attends else "products" if flops else "memory"
        node = torch._C._current_autograd_node()
        again = torch.is_grad_enabled() or (attends and "backward" not in name)
        phase = "forward" if node is None else "again" if again else "backward"
        reads, writes = self._bytes(_tensors((args, kwargs))), self._bytes([*outputs, *_tensors(changed)])
        self.operations.append(Operation(self.part, phase, kind, flops, reads, writes))
        return out

    def _bytes(self, tensors: Sequence[Tensor]) -> dict[int, int]:
        """Return the bytes of each storage that these tensors cover; of several views of one, the largest."""
        sizes: dict[int, int] = {}
        for x in tensors:
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self._storages:
                self._storages[key], self.sizes[key] = StorageWeakRef(storage), storage.nbytes()
            sizes[key] = max(sizes.get(key, 0), min(x.numel() * x.element_size(), storage.nbytes()))
        return sizes

    def alive(self) -> set[int]:
        """Return the storages that still exist."""
        return {key for key, reference in self._storages.items() if not reference.expired()}

    def enter(self, part: str) -> Callable[..., None]:
        """Return a hook that says to which part the operations after it belong."""

        def hook(*_: Any) -> None:
            self.part = part

        return hook


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _is_changed(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@dataclass(frozen=True)
class Counted:
    """Operations of a pass over a group, its FLOPs by formula, and bytes kept from the forward to the backward pass."""

    operations: list[Operation]
    needed: set[int]
    flops: Flops
    kept: int


def count(model: Any, policy: Policy, items: list[TrainItem], budget: int) -> Counted:
    """Count a forward and a backward pass over groups; rows have at most `budget` tokens."""
    counter, works, kept = Count(policy.device), [], 0
    before = {x.untyped_storage()._cdata for x in model.parameters()}
    text, vision = model.model.language_model, model.model.visual

    def mark(output: Any, forward: str, backward: str) -> None:
        """Note what comes after a module: in the forward pass now, in the backward pass when its gradient is there."""
        counter.part = forward
        for x in _tensors(output if isinstance(output, tuple) else dict(output)):
            if x.requires_grad:
                x.register_hook(counter.enter(backward))
                return

    hooks = [
        vision.register_forward_pre_hook(counter.enter("vision")),
        vision.register_forward_hook(lambda _, __, output: mark(output, "text", "vision")),
        text.register_forward_pre_hook(counter.enter("text")),
        text.register_forward_hook(lambda _, __, output: mark(output, "head", "text")),
    ]
    for batch in batches("shared", policy, items, budget):
        with counter:
            counter.part = "text"
            logp = batch.run()
            kept = max(kept, sum(counter.sizes[key] for key in counter.alive() - before))
            logp.sum().backward()
        works.append(batch.work)
    for hook in hooks:
        hook.remove()
    spans, images = (tuple(x for work in works for x in getattr(work, name)) for name in ("spans", "images"))
    work = PassWork(spans, images, sum(work.targets for work in works))
    needed = counter.alive()
    model.zero_grad(set_to_none=True)
    return Counted(counter.operations, needed, training_flops(model, work), kept)


def kernels(counted: Counted, compiled: bool) -> list[Operation]:
    """Return the operations as kernels run them: in compiled layers, those between two products as one."""
    runs: list[list[Operation]] = []
    for operation in counted.operations:
        fuses = compiled and operation.kind == "memory" and operation.part != "head"
        if fuses and runs and _same_run(runs[-1][-1], operation):
            runs[-1].append(operation)
        else:
            runs.append([operation])
    last_read: dict[int, int] = {}
    for number, run in enumerate(runs):
        last_read |= dict.fromkeys((key for operation in run for key in operation.reads), number)
    return [_as_one(run, number, last_read, counted.needed) for number, run in enumerate(runs)]


def _same_run(first: Operation, second: Operation) -> bool:
    return (first.part, first.phase, first.kind) == (second.part, second.phase, second.kind)


def _as_one(run: list[Operation], number: int, last_read: dict[int, int], needed: set[int]) -> Operation:
    """Return several operations as one: what it reads from outside, and writes for those outside."""
    if len(run) == 1:
        return run[0]
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for operation in run:
        for key, size in operation.reads.items():
            if key not in writes:
                reads[key] = max(reads.get(key, 0), size)
        for key, size in operation.writes.items():
            writes[key] = max(writes.get(key, 0), size)
    used = {key: size for key, size in writes.items() if key in needed or last_read.get(key, -1) > number}
    return dataclasses.replace(run[0], reads=reads, writes=used)


def predict(counted: Counted, rates: Rates, compiled: bool) -> Counter[tuple[str, str, str]]:
    """Return the seconds of each (part, phase, kind)."""
    seconds: Counter[tuple[str, str, str]] = Counter()
    calls = Counter((o.part, o.phase) for o in counted.operations if o.kind == "attention")
    for (part, phase), number in calls.items():
        flops = counted.flops.forward["vision attention" if part == "vision" else "attention"]
        share = BACKWARD_ATTENTION if phase == "backward" else number / calls[part, "forward"]
        seconds[part, phase, "attention"] = flops * share / rates.attention
    for kernel in kernels(counted, compiled):
        if kernel.kind != "attention":
            moved = (sum(kernel.reads.values()) + sum(kernel.writes.values())) / rates.memory
            seconds[kernel.part, kernel.phase, kernel.kind] += max(kernel.flops / rates.products, moved)
    return seconds


def measured_rates(world: World) -> Rates:
    """Measure this machine: the products of one layer's MLP, the attention of one layer over the row, and copies."""
    config, device = world.model.config.get_text_config(), world.device
    row = make_row(pack(world.items, world.case.tokens_per_row)[0], device)
    plan = plan_row(row.layout, device, backend=world.case.backend)
    tokens, hidden, inner = len(row.input_ids_N), config.hidden_size, config.intermediate_size
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    random = lambda *shape: torch.randn(*shape, device=device, dtype=world.policy.dtype)  # noqa: E731
    x, weight = random(tokens, hidden), random(inner, hidden)
    gradient, other = random(tokens, inner), random(tokens, inner)
    query, *keys = (random(1, n, tokens, hidden // heads).requires_grad_() for n in (heads, key_heads, key_heads))
    work = next(batches("shared", world.policy, world.items, world.case.tokens_per_row)).work

    def products() -> None:
        for a, b in ((x, weight.T), (gradient, weight), (gradient.T, x)):
            torch.mm(a, b)

    def attend() -> None:
        out = attention.prefix_attention(nn.Module(), query, *keys, None, row_plan=plan)[0]
        out.backward(out.detach())

    pairs = 4 * hidden * work.pairs * (1 + BACKWARD_ATTENTION)
    return Rates(
        3 * 2 * tokens * hidden * inner / median_seconds(products, 5, device),
        pairs / median_seconds(attend, 5, device),
        3 * gradient.nbytes / median_seconds(lambda: gradient * other, 5, device),
    )


def here(smoke: bool) -> dict[str, Any]:
    """Compare an update's prediction with its measurement on this machine, as a whole and by kind of operation."""
    cuda = torch.cuda.is_available() and not smoke
    case = Case("update", "small", "43M", "shared", "split", recompute=False)
    if cuda:
        case = Case("update", "taxon", "Qwen2.5-VL-3B", "shared", "varlen", rank=64, recompute=False)
    world = World(case, smoke)
    rates = measured_rates(world)
    counted = count(world.model, world.policy, world.items, case.tokens_per_row)
    ways: dict[str, Any] = {}
    for name, compiled in WAYS.items():
        if compiled:
            world = World(dataclasses.replace(case, compiled=True), smoke)
        kinds: Counter[str] = Counter(memory=_optimizer_bytes(world) / rates.memory)
        for (_, _, kind), seconds in predict(counted, rates, compiled).items():
            kinds[kind] += seconds
        measured = median_seconds(world.update, 1 if smoke else 3, world.device)
        ways[name] = {"predicted_s": kinds.total(), "measured_s": measured, "ratio": kinds.total() / measured}
        ways[name] |= {"predicted": dict(kinds)}
        if not compiled:  # a compiled operation has no name that tells its kind
            ways[name] |= {"measured": measured_kinds(world, cuda)}
    device = torch.cuda.get_device_name() if cuda else "CPU"
    return {"device": device, "rates": dataclasses.asdict(rates), "kept_gib": counted.kept / GIB, "ways": ways}


def beside_measured(smoke: bool) -> Iterator[dict[str, Any]]:
    """The comparison of this machine as lines of the GPU day."""
    result = here(smoke)
    print(text_of({"here": result}))
    rates = {f"{kind}_rate": rate / 1e12 for kind, rate in result["rates"].items()}
    for name, way in result["ways"].items():
        yield {"case": name, **way, **rates}


def measured_kinds(world: World, cuda: bool) -> dict[str, float]:
    """Return the seconds of each kind of operation in an update, by torch's profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        world.update()
    products = {str(packet).partition(".")[2] for packet in flop_registry} | {"mkldnn_convolution"}
    kinds: Counter[str] = Counter()
    for event in profiler.key_averages():
        name = event.key.rpartition("::")[2]
        kind = "attention" if any(word in name for word in ATTENTION) else "products" if name in products else "memory"
        kinds[kind] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
    return dict(kinds)


def _optimizer_bytes(world: World) -> int:
    """Return what AdamW and the clipping of gradients read and write: weight, gradient, two moments, and a norm."""
    sizes = [p.nbytes for p in world.model.parameters() if p.requires_grad]
    return 10 * sum(sizes)


def on_card(card: str, model_name: str, groups: int, rank: int, smoke: bool) -> dict[str, Any]:
    """Predict a packed row of TaxonRL's shape on a card, for each setting of recomputation."""
    peak = PEAKS[card]
    rates = Rates(REACHED["products"] * peak, REACHED["attention"] * peak, REACHED["memory"] * SHEET_BANDWIDTH[card])
    settings = []
    for setting in STEPS:
        case = Case("update", "taxon", model_name, "shared", "varlen", rank=rank, recompute=setting)
        model = make_model(case, torch.device("meta"), torch.bfloat16, smoke)
        policy = Policy(model, backend="varlen")
        policy.device = torch.device("meta")
        if policy.sharing != "packed":
            raise SystemExit(f"{model_name} runs its responses one after another: its attention is not counted")
        group = make_items(shape_of(case, smoke), model.config, torch.bfloat16)
        items = [item for number in range(groups) for item in _numbered(group, number)]
        counted = count(model, policy, items, sys.maxsize)
        row: dict[str, Any] = {"recompute": setting, "kept_gib": counted.kept / GIB}
        for name, compiled in WAYS.items():
            seconds = predict(counted, rates, compiled)
            parts: dict[str, dict[str, float]] = {}
            for (part, phase, kind), value in sorted(seconds.items()):
                parts.setdefault(f"{part} {phase}", {})[kind] = value
            total = seconds.total()
            row[name] = {"seconds": total, "mfu": counted.flops.total / total / peak, "parts": parts}
        settings.append(row)
    tokens = groups * len(group[0].prompt.ids) + sum(item.num_tokens for item in items)
    return {"card": card, "model": model_name, "tokens": tokens, "rates": dataclasses.asdict(rates), "rows": settings}


def _numbered(group: list[TrainItem], number: int) -> list[TrainItem]:
    """Return the items of a group as those of the group with this number."""
    first = number * len(group)
    return [dataclasses.replace(item, group=number, trajectory=first + item.trajectory) for item in group]


def text_of(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines: list[str] = []
    if "here" in result:
        own = result["here"]
        lines += [f"{own['device']}: {_rates(own['rates'])}", f"{'':12}{'predicted':>11}{'measured':>11}{'ratio':>8}"]
        for name, way in own["ways"].items():
            lines.append(f"{name:12}{way['predicted_s']:9.3f} s{way['measured_s']:9.3f} s{way['ratio']:8.2f}")
            for kind in way.get("measured", ()):
                lines.append(f"  {kind:10}{way['predicted'][kind]:9.3f} s{way['measured'][kind]:9.3f} s")
    if "card" in result:
        card = result["card"]
        lines += [f"{card['model']}, a row of {card['tokens']:,} tokens on one {card['card']}: {_rates(card['rates'])}"]
        lines += [f"{'recomputed':12}{'kept':>10}" + "".join(f"{name:>14}{'MFU':>8}" for name in WAYS)]
        for row in card["rows"]:
            ways = "".join(f"{row[name]['seconds']:12.3f} s{row[name]['mfu']:8.1%}" for name in WAYS)
            lines.append(f"{row['recompute']!s:12}{row['kept_gib']:6.1f} GiB{ways}")
        lines += [f"{'part, ms':18}" + "".join(f"{kind:>12}" for kind in REACHED) + "   (compiled, nothing recomputed)"]
        for part, kinds in card["rows"][0]["compiled"]["parts"].items():
            lines.append(f"{part:18}" + "".join(f"{1e3 * kinds.get(kind, 0.0):12.1f}" for kind in REACHED))
    return "\n".join(lines)


def _rates(rates: dict[str, float]) -> str:
    products, attends, memory = (rates[kind] for kind in REACHED)
    return f"products {products / 1e9:,.0f} GF/s, attention {attends / 1e9:,.0f} GF/s, memory {memory / 1e9:,.0f} GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--card", choices=sorted(SHEET_BANDWIDTH), default="NVIDIA H100 80GB HBM3")
    parser.add_argument("--model", default="Qwen2.5-VL-7B")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--only", choices=("here", "card"))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    real = attention._takes_kernel
    attention._takes_kernel = lambda query: query.is_meta or real(query)
    result: dict[str, Any] = {}
    if args.only != "card":
        result["here"] = here(args.smoke)
    if args.only != "here":
        result["card"] = on_card(args.card, args.model, args.groups, args.rank, args.smoke)
    print(json.dumps(result, indent=2) if args.json else text_of(result))


if __name__ == "__main__":
    main()

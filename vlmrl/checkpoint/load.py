"""Loading of a checkpoint's model: whole weights, or an adapter on its base model, which must be unchanged."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from vlmrl.checkpoint.io import check_files, link_weights, load_weights, model_tensors
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import CheckpointError, VlmrlError
from vlmrl.model.load import DTYPES, prepare_model, read_model
from vlmrl.model.lora import attach_adapter, load_adapter_tensors, read_adapter
from vlmrl.model.model_facts import loading
from vlmrl.model.model_files import CONFIG
from vlmrl.model.safetensors_blocks import refuse_non_finite
from vlmrl.model.stored_weights import OWN_CODE, empty_model, set_loaded_whole, value_blocks
from vlmrl.recipe.schema import Lora
from vlmrl.store.checkpoints import ADAPTER, HF, read_meta
from vlmrl.store.layout import COMPLETE, checkpoint_dir, step_name
from vlmrl.store.lineage import places_of
from vlmrl.store.manifest import check_record, model_of
from vlmrl.store.runs import open_run

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Model

CHECKSUM_ELEMENTS = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def load_checkpoint_model(checkpoint: Path, settings: Model, in_files: bool = False) -> Any:
    """Return the model of a checkpoint: architecture from its `hf` folder, weights from its `model` folder.

    torch's random state does not change.

    Args:
        settings: dtype, device and `trust_remote_code`; its path is not used.
        in_files: whether the weights stay in their files; see `read_model`.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    hf = checkpoint / HF
    check_files(checkpoint, HF)
    with loading(str(hf)):
        trust = settings.trust_remote_code
        config = AutoConfig.from_pretrained(hf, trust_remote_code=trust)
        dtype = DTYPES[settings.dtype]
        model = empty_model(config, dtype, trust) if in_files else None
        if model is None or model.is_custom_code():
            with torch.random.fork_rng(devices=[]):  # it draws weights, which are then overwritten
                model = AutoModelForImageTextToText.from_config(config, dtype=dtype, trust_remote_code=trust)
            if in_files:
                set_loaded_whole(model, OWN_CODE)
                in_files = False
        if (hf / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(hf)
    if in_files:
        link_weights(checkpoint, model)
        return model
    load_weights(checkpoint, model)
    model.tie_weights()
    refuse_non_finite(model, str(checkpoint))
    return model


def saved_lora(checkpoint: Path) -> Lora | None:
    """Return the `[lora]` table of a checkpoint's adapter; None if the checkpoint has whole weights instead."""
    table = read_meta(checkpoint).get("lora")
    return None if table is None else check_record(model_of(Lora), table, "meta.json: `lora`", checkpoint)


def load_saved(
    checkpoint: Path, settings: Model, lora: Lora | None = None, world: World | None = None, root: Path | None = None
) -> Any:
    """Return the model of a checkpoint, ready to train and sample. An adapter is attached, not merged.

    Args:
        lora: replacement for the `[lora]` table of the adapter (only its dropout may differ).
        world: the ranks that will shard the model, whose weights stay in their files; None = it is loaded whole.
        root: as in `find_base`.
    Raises: CheckpointError if a file was changed, or if the adapter's base model is missing or has changed.
    """
    if saved_lora(checkpoint) is None:
        return prepare_model(load_checkpoint_model(checkpoint, settings, world is not None), settings)
    path = str(find_base(checkpoint, root=root))
    base = prepare_model(load_base(checkpoint, settings, path=path, world=world), settings)
    return put_adapter(base, checkpoint, settings, lora)


def put_adapter(base: Any, checkpoint: Path, settings: Model, lora: Lora | None = None) -> Any:
    """Attach the checkpoint's adapter to a base model, in place."""
    lora = lora or saved_lora(checkpoint)
    assert lora is not None
    check_files(checkpoint, ADAPTER)
    attach_adapter(base, lora, read_meta(checkpoint).get("freeze", ()), DTYPES[settings.dtype])
    load_adapter_tensors(base, read_adapter(checkpoint / ADAPTER))
    return base


def load_base(checkpoint: Path, settings: Model, *, path: str | None = None, world: World | None = None) -> Any:
    """Return the base model of a checkpoint's adapter, unchanged: `prepare_model` has not been applied.

    Args:
        settings: dtype, device and `quantize`.
        path: as in `find_base`.
        world: as in `load_saved`.
    Raises: CheckpointError if it is missing or its weights differ.
    """
    meta = read_meta(checkpoint)
    base = meta["base"]
    place = find_base(checkpoint, path)
    try:
        if isinstance(place, Path):
            model = load_checkpoint_model(place, settings, world is not None)
        else:
            from_hub = settings.model_copy(update={"path": place, "revision": base["revision"]})
            model = read_model(from_hub, in_files=world is not None)
    except CheckpointError as error:
        message = f"the base model `{base['path']}` of this adapter cannot be loaded: {error.message}"
        raise CheckpointError(message, where=str(checkpoint), hint=BASE_HINT) from error
    exact = (meta["dtype"], meta.get("quantize")) == (settings.dtype, settings.quantize)
    if exact and fingerprint(model, world or ALONE) != base.get("fingerprint"):
        refuse_base(checkpoint)
    return model


def refuse_base(checkpoint: Path) -> NoReturn:
    """Raise a CheckpointError with the message that the weights of the base model differ."""
    path = read_meta(checkpoint)["base"]["path"]
    message = f"`{path}` is not the base model that this adapter was trained on: its weights differ"
    raise CheckpointError(message, where=str(checkpoint), hint=BASE_HINT)


BASE_HINT = (
    "an adapter works on its own base model only: move that back to its old place, or make a link there; "
    "`vlmrl merge RUN --base PATH` takes another place"
)


def fingerprint(model: nn.Module, world: World = ALONE) -> str:
    """Return a checksum of a model's weights: of their names, shapes and all bits. It does not depend on the device.

    Each tensor contributes the sum of its bit patterns, and the same sum weighted by position. So any single change is
    detected. It detects a mix-up of models, not an attack. Packed 4-bit weights are left out, because devices pack them
    differently.

    Args:
        world: the ranks that have the same model; each sums up some of its tensors.
    """
    digest = hashlib.sha256()
    parameters = dict(model.named_parameters())
    tensors = [(n, t) for n, t in sorted(model_tensors(model).items()) if t.is_floating_point()]
    mine = []
    for index in world.mine(len(tensors)):
        name, tensor = tensors[index]
        sums = BitSums()
        for block in value_blocks(parameters.get(name, tensor)):
            sums.add(block)
        mine.append(sums.pair)
    for (name, tensor), pair in zip(tensors, world.interleave(mine), strict=True):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {pair}".encode())
    return digest.hexdigest()


class BitSums:
    """The two sums of a tensor for `fingerprint`. The tensor may be added in consecutive parts."""

    def __init__(self) -> None:
        self._plain = self._weighted = self._seen = 0

    @property
    def pair(self) -> tuple[int, int]:
        """(Sum of the bit patterns, the same sum weighted by position from 1)."""
        return self._plain, self._weighted

    def add(self, tensor: Tensor) -> None:
        """Add the next values of the tensor."""
        bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
        for start in range(0, len(bits), CHECKSUM_ELEMENTS):
            piece = bits[start : start + CHECKSUM_ELEMENTS].to(torch.int64)
            positions = torch.arange(1, len(piece) + 1, device=piece.device)
            plain = int(piece.sum())
            self._plain += plain
            # `positions` count from 1 within the piece. `_seen` values came before, and shift every position.
            self._weighted += int((piece * positions).sum()) + self._seen * plain
            self._seen += len(piece)


def find_base(checkpoint: Path, path: str | None = None, root: Path | None = None) -> Path | str:
    """Return the location of the base model: a complete checkpoint as a Path, or a folder or hub name as text.

    Without `path`, these are tried in order: the checkpoint of another run, in the folders of `places_of`; the recorded
    path, relative to the current folder or to the folder in which the run was started; a hub name.

    Args:
        path: present folder of the base model, if it was moved.
        root: folder of the runs (`--runs`); None = the usual one.
    Raises: CheckpointError if it is a checkpoint of another run, and in none of these places.
    """
    if path is not None:
        return Path(path) if (Path(path) / COMPLETE).is_file() else path
    base = read_meta(checkpoint)["base"]
    run_dir = checkpoint.absolute().parent.parent
    recorded = Path(base["path"])
    places = [recorded]
    with suppress(VlmrlError):  # there is no manifest if the checkpoint was moved out of its run
        places.append(Path(open_run(run_dir.parent, run_dir.name).manifest.cwd) / recorded)
    folders = places_of(base["run"], run_dir, root) if base.get("run") else []
    # The recorded path may be the folder of that run.
    places = [*(checkpoint_dir(folder, base["step"]) for folder in (*folders, *places) if folders), *places]
    complete = next((p for p in places if (p / COMPLETE).is_file()), None)
    if folders and complete is None and not any((p / CONFIG).is_file() for p in places):
        message = f"the base model of this adapter is {step_name(base['step'])} of run {base['run']} (`{recorded}`)"
        searched = ", ".join(str(folder.parent) for folder in folders)
        hint = "name the folder that has this run with --runs DIR, or move the run there"
        raise CheckpointError(f"{message}, and it is not in {searched}", where=str(checkpoint), hint=hint)
    return complete or str(next((p for p in places if p.exists()), recorded))

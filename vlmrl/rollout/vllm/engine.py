"""vLLM as the rollout engine, in the trainer's own process and on its device.

Only this module and worker.py import vllm. Tokens in, tokens out: vLLM gets the prompt's ids with one placeholder per
image, the images, and the processor settings of the trainer. The ids that it computes from them must equal the
trainer's. Its weights are a copy; `load_weights` updates it. Where the trainer has pixels of an image, the engine's
copy of the image processor returns these. This works for families whose processor fits an image to a grid of patches;
for others the engine processes the images again. An image is identified by its content, because engines and processors
copy images.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from vlmrl.data.encode import NOT_MODEL_INPUTS, EncodedPrompt, tensor_bytes
from vlmrl.data.images import BoundedCache
from vlmrl.dist.engine_isolation import has_world, undisturbed, world_kept
from vlmrl.errors import EngineError
from vlmrl.model.memory import BATCHED_TOKENS, MAX_SEQUENCES
from vlmrl.recipe.rules.engine import MIN_TEMPERATURE, TORCH_HINT, VLLM_HINT, vllm_refusal
from vlmrl.rollout.engine import Generator, SamplingRequest, SyncSpeed
from vlmrl.rollout.response_end import ResponseEnd, ResponseTexts
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.vllm.transports import WORDS, SharedFolder
from vlmrl.rollout.vllm.weight_loading import Handover, InProcess, ToWorkers, check_freed
from vlmrl.rollout.weight_sync import WeightSource, folder_bytes
from vlmrl.types import Sample, SamplingParams, name_row

CACHE = os.environ.get("VLLM_CACHE_ROOT") or os.path.expanduser("~/.cache/vllm")
"""Folder in which vLLM keeps compiled code."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates; an adapter gets the next larger one."""


def lora_options(settings: EngineSettings) -> dict[str, Any]:
    """Return the options for an adapter; {} without one.

    Raises: EngineError when the adapter's rank is too large.
    """
    if not settings.lora_rank:
        return {}
    rank = next((r for r in LORA_RANKS if r >= settings.lora_rank), None)
    if rank is None:
        raise EngineError(f"an adapter of rank {settings.lora_rank} is too large for vLLM: {LORA_RANKS[-1]} at most")
    return {
        "enable_lora": True,
        "max_lora_rank": rank,
        "max_loras": 1,
        "enable_tower_connector_lora": settings.lora_vision,
    }


def gpu_options(settings: EngineSettings) -> dict[str, Any]:
    """Return the options for an engine on this process's own GPU; in parts, on all GPUs that the process sees.

    Other GPUs may be in use. By default an engine in the process takes the first visible GPU, and requires its share of
    the GPU's memory (92%) to be free before it starts; it allocates what its weights and `kv_cache_bytes` need. Each
    engine has its own cache of compiled code, because engines that are built at the same time would write the same
    files.
    """
    gpu = torch.cuda.current_device()
    torch.cuda.empty_cache()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)
    os.environ["VLLM_CACHE_ROOT"] = os.path.join(CACHE, f"gpu-{name}")
    total = torch.cuda.get_device_properties(gpu).total_memory
    options: dict[str, Any] = {"gpu_memory_utilization": min(1.0, settings.kv_cache_bytes / total)}
    return options if settings.tensor_parallel > 1 else options | {"device_ids": [gpu]}


GRID = "image_grid_thw"
"""Name of the tensor with frames, rows and columns of patches of each image; the patches of all images follow each
other."""
MADE_BYTES = 2**28
"""Size of the cache of pixels that an engine computed itself; 256 MiB are 10 images of one megapixel."""


class SharedPixels:
    """Pixels by image: those of the current prompt, and those computed here before.

    Attributes:
        made: number of images that were processed here.
    """

    def __init__(self) -> None:
        self.made = 0
        self._given: list[tuple[Any, Mapping[str, Tensor]]] = []
        self._kept: BoundedCache[Mapping[str, Tensor]] = BoundedCache(MADE_BYTES, tensor_bytes)

    @contextmanager
    def of(self, prompt: EncodedPrompt) -> Iterator[None]:
        """Context manager: the pixels of this prompt's images are available. Nothing is copied."""
        pixels = split_images(prompt.images)
        self._given = list(zip(prompt.pictures, pixels, strict=True)) if pixels else []
        try:
            yield
        finally:
            self._given = []

    def serve(self, image_processor: Any) -> None:
        """Make an image processor of a grid family ask this object first, instead of any other that it asked before.

        Does nothing for other families.
        """
        own = type(image_processor)
        if isinstance(image_processor, _Asking):
            own = own.__mro__[2]
        if hasattr(image_processor, "merge_size"):
            image_processor.__class__ = type(own.__name__, (_Asking, own), {"shared": self})

    def pixels(self, image: Any, process: Any) -> Mapping[str, Tensor]:
        """Return the tensors of one image.

        Args:
            process: computes them.
        """
        for picture, pixels in self._given:
            if _equal(picture, image):
                return pixels

        def make() -> Mapping[str, Tensor]:
            self.made += 1
            return process()

        return self._kept.get(_content(image), make)


def _equal(picture: Any, image: Any) -> bool:
    if picture is image:
        return True
    alike = (picture.mode, picture.size) == (image.mode, image.size)
    return alike and picture.tobytes() == image.tobytes()


def _content(image: Any) -> Hashable:
    return image.mode, image.size, blake2b(image.tobytes(), digest_size=16).digest()


class _Asking:
    """Image processor that asks `shared` for the pixels of each image."""

    shared: SharedPixels

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers.feature_extraction_utils import BatchFeature

        process = super().__call__  # type: ignore[misc]  # method of the class that this one is mixed into
        every = images if isinstance(images, (list, tuple)) else [images]
        if not every or any(isinstance(image, (list, tuple)) for image in every):
            return process(images, *args, **kwargs)
        if any(kwargs.get(step) is False for step in ("do_resize", "do_rescale", "do_normalize")):
            self.shared.made += len(every)  # not the trainer's pixels: the engine does that step elsewhere
            return process(images, *args, **kwargs)
        tensors = [self.shared.pixels(image, lambda image=image: process([image], *args, **kwargs)) for image in every]
        names = [name for name in tensors[0] if name not in NOT_MODEL_INPUTS]
        return BatchFeature({name: torch.cat([pixels[name] for pixels in tensors]) for name in names})


def split_images(images: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each image of a prompt, as views.

    [] for families without a grid of patches, and for no images. Example: grids [1, 2, 2] and [1, 4, 2]: the first 4
    patches and the next 8.
    """
    if GRID not in images:
        return []
    lengths = images[GRID].prod(-1).tolist()
    parts = {name: x.split(1 if name == GRID else lengths) for name, x in images.items()}
    return [{name: part[k] for name, part in parts.items()} for k in range(len(lengths))]


SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: no process remains when the run is killed
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for the command's own result
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    # FlashInfer's sampler returns no log-probs, so it would only be compiled and never used.
    "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
}
SETTINGS_IN_PARTS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # workers inherit no state of this process
    # vLLM's default needs one memory node per worker.
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
}
"""Additional settings of an engine with worker processes."""


@dataclass(frozen=True)
class _Open:
    """Request that vLLM has not completed. `name`: vLLM's own id of it."""

    name: str
    request: SamplingRequest
    params: SamplingParams


class VllmEngine(Generator):
    """Engine that generates with vLLM and its own copy of a policy's weights. Unusable before the first `load_weights`.

    Several processes with a sharded policy have one engine each. They create them at the same time, and call
    `load_weights` together. They generate independently; `PromptQueue` lets them take prompts from each other.

    Args:
        weights: source of the copy. With an adapter the base is copied once, at the start, then only the adapter.
        tokenizer: the trainer's; decodes responses.
        say: called once with a note on what this platform does not support.
    Raises: EngineError when vllm cannot be imported, cannot generate for the model, or does not start.
    """

    copies_weights, works_alone, admits, max_open = True, False, True, MAX_SEQUENCES

    def __init__(
        self, weights: WeightSource, tokenizer: Any, settings: EngineSettings, *, say: Callable[[str], None]
    ) -> None:
        refusal = vllm_refusal(weights.model_type, settings.device, settings.dtype, weights.two_way_images)
        if refusal is not None:
            raise EngineError(refusal, hint=TORCH_HINT)
        self.weights, self._texts, self.settings = weights, ResponseTexts(tokenizer), settings
        self.version = 0
        self._loaded = self._discarded = False
        self._adapter: Any = None
        self._open: dict[int, _Open] = {}
        self._progress: Callable[[int], Any] = lambda n: None
        self._in_world = has_world()  # read before vLLM creates a process group of its own
        self._folder = SharedFolder()
        self._handover: Handover = InProcess(weights)
        if settings.tensor_parallel > 1:
            self._handover = ToWorkers(weights, self._folder.path / "weights", settings.tensor_parallel)
        self._llm = _start(settings, self._handover)
        self.pixels = SharedPixels()
        self.pixels.serve(_image_processor(self._llm, settings))
        if settings.tensor_parallel > 1:
            self._folder.adopt_segments()
        if not settings.sleeps:
            say("vLLM on a CPU cannot sleep: its key-value cache stays in memory during updates")

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        self._folder.close()
        with world_kept() if self._in_world else nullcontext():
            self._llm.llm_engine.engine_core.shutdown()

    def sleep(self) -> None:
        """Free the key-value cache and the weights' memory. On a CPU nothing is freed.

        Raises: EngineError when less than that became free on a GPU of the engine.
        """
        if not self.settings.sleeps or self._llm.llm_engine.is_sleeping():
            return
        self._discarded = self.settings.discards
        plans = self._llm.collective_rpc("prepare_sleep", args=(self.settings.kv_cache_bytes, self._discarded))
        self._llm.sleep(level=2 if self._discarded else 1)
        for (before, planned), after in zip(plans, self._llm.collective_rpc("free_bytes"), strict=True):
            check_freed(before, after, planned)

    def wake(self) -> None:
        """Undo `sleep`. `load_weights` does it too, weights first."""
        self._wake()

    def _wake(self, *tags: str) -> None:
        if self.settings.sleeps and self._llm.llm_engine.is_sleeping():
            torch.cuda.empty_cache()  # the engine does not allocate from torch's cache: return what the trainer freed
            self._llm.wake_up(tags=list(tags) or None)
            self._llm.collective_rpc("finish_wake", args=(not tags,))

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        """Copy the policy's weights and clear what was computed with the old ones.

        All ranks of a sharded policy must call this together.

        Raises: EngineError when a tensor did not arrive.
        """
        self._wake("weights")
        if changed or self._discarded or not self._loaded:
            start = time.perf_counter()
            size = self._send_adapter(version) if self.weights.adapted else self._send_all(version)
            if torch.cuda.is_initialized():  # not where the parts are processes of their own: it would take a context
                torch.cuda.synchronize()
            self.last_sync = SyncSpeed(size, time.perf_counter() - start, WORDS["memory"])
        self._loaded, self._discarded, self.version = True, False, version
        self.wake()

    @contextmanager
    def round(self, progress: Callable[[int], Any] | None = None) -> Iterator[None]:
        """Context manager: the global random generator is as before when it ends. See `Generator.round`."""
        self._progress = progress or (lambda n: None)
        devices = [torch.cuda.current_device()] if self.settings.device == "cuda" else []
        with torch.random.fork_rng(devices):  # vLLM also draws from the global generator, without using the numbers
            try:
                yield
            finally:
                if self._open:  # interrupted: no request of this round may remain for the next
                    self._llm.llm_engine.abort_request([one.name for one in self._open.values()], internal=True)
                    self._open = {}

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        """Queue a request: see `Generator.submit`. Its samples share the prompt's keys and values.

        Raises: EngineError when the prompt is too long.
        """
        self._check(request, params)
        with self.pixels.of(request.prompt):
            (name,) = self._llm.enqueue(
                [_prompt(request)],
                [_vllm_params(request, params)],
                use_tqdm=False,
                lora_request=self._adapter,
                mm_processor_kwargs=dict(self.settings.image_arguments),
            )
        number = int(name.partition("-")[0])  # vLLM adds random letters to the number by which it returns the output
        self._open[number] = _Open(name, request, params)
        return number

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        """Generate until a request is complete: see `Generator.poll`.

        Raises: EngineError when the engine's ids of a prompt differ from the trainer's.
        """
        end = None if timeout is None else time.monotonic() + timeout
        complete: list[tuple[int, list[Sample]]] = []
        while self._open and not complete:
            for output in self._llm.llm_engine.step():
                one = self._open.pop(int(output.request_id))
                complete.append((int(output.request_id), self._samples(one.request, output, one.params)))
                self._progress(len(output.outputs))
            if end is not None and time.monotonic() >= end:
                break
        return complete

    def _check(self, request: SamplingRequest, params: SamplingParams) -> None:
        if not self._loaded:
            raise EngineError("the engine has no weights yet", hint="call load_weights first")
        if 0 < params.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"vLLM cannot sample at temperature {params.temperature}: it takes at least {MIN_TEMPERATURE}, or 0",
                hint='raise rollout.temperature, or use rollout.engine = "torch"',
            )
        longest = len(request.prompt.prompt_ids) + params.max_new_tokens
        if longest > self.settings.max_tokens:
            raise EngineError(
                f"prompt and response may have {longest} tokens, and the engine was built for"
                f" {self.settings.max_tokens}",
                where=_name(request),
                hint="raise rollout.max_prompt_tokens",
            )

    def _samples(self, request: SamplingRequest, output: Any, params: SamplingParams) -> list[Sample]:
        _check_prompt(request, output.prompt_token_ids)
        outputs = sorted(output.outputs, key=lambda o: o.index)
        if params.temperature == 0:  # generated once: all would be the same
            outputs = outputs * request.num_samples
        return [self._sample(o, params, request, request.seed + k) for k, o in enumerate(outputs)]

    def _sample(self, output: Any, params: SamplingParams, request: SamplingRequest, seed: int) -> Sample:
        end, ids = ResponseEnd(params, self._texts), list(output.token_ids)
        logp = [logprobs[token].logprob for token, logprobs in zip(ids, output.logprobs, strict=True)]
        # vLLM searches stop strings in text that it decodes piece by piece; the common rule of both engines decides.
        for count, token in enumerate(ids, 1):
            if (reason := end.add(token)) is not None:
                text = self._texts.response(ids[:count])
                return Sample(tuple(ids[:count]), text, tuple(logp[:count]), reason, self.version, seed)
        raise EngineError(
            f"the engine ended a response after {len(ids)} tokens ({output.finish_reason}); no stop rule did",
            where=_name(request),
        )

    def _send_all(self, version: int) -> int:
        """Send all weights through vLLM's own loader, which fuses and repacks them, and return their bytes."""
        self._handover.during(f"weight sync to version {version}", lambda: self._llm.collective_rpc("take_new_weights"))
        self._forget()
        return self._handover.sent_bytes

    def _send_adapter(self, version: int) -> int:
        """Send the adapter through a folder in memory, and return its bytes.

        Each adapter has a new name and number. The engine's prefix cache is keyed by them, so keys of an old adapter
        are never used for a new one.
        """
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        before, number = self._adapter, 1 if self._adapter is None else self._adapter.lora_int_id + 1
        folder = self._folder.path / f"policy-{number}"
        self.weights.write_adapter(folder)
        self._adapter = LoRARequest(f"policy-{number}", number, str(folder))
        if before is not None:
            self._llm.llm_engine.remove_lora(before.lora_int_id)
            shutil.rmtree(before.lora_path)
        try:
            is_loaded, reason = self._llm.llm_engine.add_lora(self._adapter), "it gave no reason"
        except (RuntimeError, ValueError) as error:
            is_loaded, reason = False, str(error)
        if not is_loaded:
            raise EngineError(
                f"weight sync to version {version}: the engine did not load the adapter: {reason}",
                hint='vLLM serves plain LoRA and rsLoRA on linear layers; otherwise rollout.engine = "torch"',
            )
        self._forget()
        return folder_bytes(folder)

    def _forget(self) -> None:
        """Empty the caches of image features, and of keys and values."""
        self._llm.llm_engine.reset_encoder_cache()
        self._llm.llm_engine.reset_mm_cache()
        if not self._llm.reset_prefix_cache():
            raise EngineError("the engine did not clear keys and values of older weights: it still has requests")


def _image_processor(llm: Any, settings: EngineSettings) -> Any:
    """Return the image processor that the engine runs in this process."""
    processor = llm.llm_engine.renderer.get_mm_processor()
    return processor.info.get_hf_processor(**settings.image_arguments).image_processor


def _name(request: SamplingRequest) -> str:
    return name_row(request.prompt.row.source, request.prompt.row.prompt_id)


def _prompt(request: SamplingRequest) -> dict[str, Any]:
    e = request.prompt
    prompt: dict[str, Any] = {"prompt_token_ids": list(e.unexpanded_ids)}
    if e.pictures:
        # The images' file hashes serve as ids, so vLLM does not hash them again.
        prompt["multi_modal_data"] = {"image": list(e.pictures)}
        prompt["multi_modal_uuids"] = {"image": [media.sha256 for media in e.row.media]}
    return prompt


def _vllm_params(request: SamplingRequest, params: SamplingParams) -> Any:
    from vllm import SamplingParams as VllmParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    vllm_params = VllmParams(
        n=request.num_samples if params.temperature > 0 else 1,
        seed=request.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_new_tokens,
        stop_token_ids=list(params.stop_ids),
        ignore_eos=True,
        stop=list(params.stop),
        detokenize=bool(params.stop),
        skip_special_tokens=True,
        include_stop_str_in_output=True,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    # Exactly -inf: log-probs are normalised over the remaining ids, as the trainer's are.
    vllm_params.logit_bias = {i: float("-inf") for i in params.banned_ids} or None
    return vllm_params


def _check_prompt(request: SamplingRequest, ids: Sequence[int]) -> None:
    """Raise an EngineError unless the engine's ids of a prompt are the trainer's."""
    expected = request.prompt.prompt_ids
    if tuple(ids) == tuple(expected):
        return
    at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected)))
    raise EngineError(
        f"the engine's prompt has {len(ids)} ids, the trainer's {len(expected)}; they differ from token {at} on",
        where=_name(request),
        hint="both must have the same processor: compare preprocessor_config.json of the model",
    )


def _start(settings: EngineSettings, handover: Handover) -> Any:
    """Return a `vllm.LLM` with the trainer's weights."""
    try:
        os.environ.update(SETTINGS | (SETTINGS_IN_PARTS if settings.tensor_parallel > 1 else {}))
        import vllm  # pyright: ignore[reportMissingImports]

        from vlmrl.rollout.vllm import worker as vllm_worker
    except ImportError as error:
        raise EngineError(f"vllm cannot be imported: {error}", hint=VLLM_HINT) from error
    cpu = settings.device == "cpu"
    options: dict[str, Any] = {
        "load_format": vllm_worker.LOAD_FORMAT,
        "worker_extension_cls": f"{vllm_worker.__name__}.Reloading",
        "dtype": settings.dtype,
        "max_model_len": settings.max_tokens,
        "max_num_batched_tokens": max(BATCHED_TOKENS, settings.max_tokens),
        "enforce_eager": cpu,
        "enable_chunked_prefill": not cpu,  # on a CPU vLLM has a bug with seeded requests that are prefilled in parts
        "enable_sleep_mode": settings.sleeps,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "mm_device_do_normalize": False,  # pixels normalized by the processor, as the trainer's are
        "skip_mm_profiling": True,
        "limit_mm_per_prompt": {"image": settings.max_tokens, "video": 0},  # an image has a token or more
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "tensor_parallel_size": settings.tensor_parallel,
        **lora_options(settings),
    }
    if not cpu:
        options |= {"max_num_seqs": MAX_SEQUENCES} | gpu_options(settings)
    with undisturbed():
        try:
            return handover.during(
                "start of the engine",
                lambda: vllm.LLM(  # pyright: ignore[reportAttributeAccessIssue]
                    settings.folder, revision=settings.revision, trust_remote_code=settings.trust_remote_code, **options
                ),
            )
        except EngineError:
            raise
        except Exception as error:  # any class: an unexpected model can end in a KeyError, for example
            raise EngineError(
                f"vLLM does not start: {type(error).__name__}: {error}",
                hint='VLLM_LOGGING_LEVEL=INFO shows its messages; rollout.engine = "torch" needs no vLLM',
            ) from error

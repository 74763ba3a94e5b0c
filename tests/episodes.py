"""An engine whose samples are episodes made by hand: what later comes from environments and teachers."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from PIL import Image, ImageDraw

from vlmrl.data.encode import Encoder
from vlmrl.model.packing import PromptTokens, TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.types import Call, Media, Sample, SamplingParams, Segment, Turn


def drawn(seed: int, width: int = 56, height: int = 56) -> tuple[Media, bytes, Image.Image]:
    """An image by content, its file and its pixels."""
    image = Image.new("RGB", (width, height), (40 * seed % 255, 90, 160))
    ImageDraw.Draw(image).ellipse((5 + seed % 9, 8, 30, 40), fill=(250, 20 * seed % 255, 30))
    sink = io.BytesIO()
    image.save(sink, "PNG")
    content = sink.getvalue()
    return Media(hashlib.sha256(content).hexdigest(), width, height), content, image


class Episodes:
    """A generator around another one.

    The last sample of each prompt becomes a demonstration. Each other one becomes two turns of the policy, the first
    and the second half of what was sampled, with a tool's answer between them: a text and an image. The log-probs are
    those of the policy over the whole episode.
    """

    def __init__(self, inner: Generator, policy: Policy, encoder: Encoder, demonstration: str = "") -> None:
        self.inner, self.policy, self.encoder, self.demonstration = inner, policy, encoder, demonstration
        self.asked: dict[int, tuple[SamplingRequest, SamplingParams]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    generate = Generator.generate

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        number = self.inner.submit(request, params)
        self.asked[number] = request, params
        return number

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        return [(number, self._changed(*self.asked.pop(number), own)) for number, own in self.inner.poll(timeout)]

    def _changed(self, request: SamplingRequest, params: SamplingParams, own: list[Sample]) -> list[Sample]:
        if params.temperature == 0 or len(own) < 2:  # validation, and the check of a sync
            return own
        return [self._demonstrated(s) if k == len(own) - 1 else self._episode(request, s) for k, s in enumerate(own)]

    def _demonstrated(self, sample: Sample) -> Sample:
        ids = self.encoder.encode_text(self.demonstration)
        segment = Segment("assistant", ids, False, author="demonstration")
        return Sample(ids, self.demonstration, (), "stop", sample.version, sample.seed, (segment,))

    def _episode(self, request: SamplingRequest, sample: Sample) -> Sample:
        half = max(1, len(sample.token_ids) // 2)
        media, content, image = drawn(sample.seed % 5)
        token = self.encoder.processor.image_token
        grid = self.encoder.processor.image_processor(images=[image], return_tensors="pt")["image_grid_thw"]
        count = int(grid.prod()) // self.encoder.processor.image_processor.merge_size**2
        shown = f"<|im_end|>\n<|im_start|>user\n<|vision_start|>{token * count}<|vision_end|>see<|im_end|>\n"
        tool = tuple(self.encoder.tokenizer(shown, add_special_tokens=False)["input_ids"])
        size = self.encoder._model_size({"image_grid_thw": grid})
        middle = Segment("tool", tool, False, author="environment", media=(media,), seen_sizes=(size,))
        ids = [sample.token_ids[:half], sample.token_ids[half:]]
        parts = [Segment("assistant", ids[0], True), middle, *[Segment("assistant", i, True) for i in ids[1:] if i]]
        whole = tuple(t for part in parts for t in part.ids)
        kinds, tensors = self.encoder.encode_tail(whole, [media], [image], "an episode")
        item = TrainItem(PromptTokens.of(request.prompt), 0, tuple(parts), 0, kinds, tensors)
        with torch.no_grad():
            said = iter(self.policy(make_row([item], self.policy.device)).logp.tolist())
        parts = [
            Segment(p.role, p.ids, True, tuple(next(said) for _ in p.ids), version=sample.version) if p.trained else p
            for p in parts
        ]
        texts = [self.encoder.tokenizer.decode(i, skip_special_tokens=True) for i in ids]
        turns = (
            Turn("assistant", texts[0], calls=(Call("zoom", {"box": [0, 0, 9, 9]}),)),
            Turn("tool", "see", (media,)),
            Turn("assistant", texts[1]),
        )
        logp = tuple(x for p in parts for x in p.sampler_logp or (float("nan"),) * len(p.ids))
        return Sample(
            whole,
            "\n".join(texts),
            logp,
            sample.finish,
            sample.version,
            sample.seed,
            tuple(parts),
            turns,
            {media.sha256: content},
        )

"""Choose tokens from logits. Knows rows of numbers and `Draw`s; nothing of the pool, of requests or of text.

The warping steps are transformers' own, in its order: penalties, temperature, top-k, top-p, min-p. Random numbers are
keyed by (seed, position), so a reply does not depend on its neighbours, and one that is preempted goes on as it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.batch import Draw
from engine.errors import StepError
from engine.protocol import Sampling

COLDEST = 1e-4  # a temperature below it is greedy: dividing by it would overflow


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of `logits` [rows, vocabulary]; row i belongs to `draws[i]`.

    Raises `StepError` when the logits hold NaN: such a step has no honest answer.
    """
    if torch.isnan(logits).any():
        raise StepError("the model returned logits that are not numbers (NaN)")
    greedy = logits.argmax(dim=-1).tolist()
    return [
        best if _is_plain_greedy(draw.sampling) else _sample_row(logits[i], draw)
        for i, (best, draw) in enumerate(zip(greedy, draws, strict=True))
    ]


def _is_plain_greedy(sampling: Sampling) -> bool:
    return (
        sampling.temperature < COLDEST
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
    )


def _sample_row(logits: torch.Tensor, draw: Draw) -> int:
    sampling = draw.sampling
    scores = _penalise(logits.float()[None], draw)
    if sampling.temperature < COLDEST:
        return int(scores.argmax())
    scores = _warpers(sampling)(None, scores)
    cumulated = scores.softmax(dim=-1).double().cumsum(dim=-1)[0]
    point = torch.tensor([uniform(draw.seed, draw.position)], dtype=torch.float64, device=logits.device)
    # The first token whose cumulated probability exceeds the point; one of zero probability adds nothing, so is
    # never it. The point is scaled by the sum, which rounding leaves a little off one.
    return int(torch.searchsorted(cumulated, point * cumulated[-1], right=True).clamp(max=len(cumulated) - 1))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the seed (64 bits) and the position in the sequence."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(bits).random())


def _penalise(scores: torch.Tensor, draw: Draw) -> torch.Tensor:
    sampling = draw.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor([[*draw.prompt_ids, *draw.reply_ids]], device=scores.device)
        scores = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))(seen, scores)
    if draw.reply_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.bincount(torch.tensor(draw.reply_ids), minlength=scores.shape[-1])[: scores.shape[-1]]
        counts = counts.to(scores.device)
        scores = scores - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty
    return scores


@lru_cache(maxsize=256)
def _warpers(sampling: Sampling) -> Any:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(float(sampling.min_p)))
    return warpers

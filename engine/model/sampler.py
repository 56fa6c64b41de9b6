"""Choose tokens from logits. Knows rows of numbers and `Draw`s; nothing of the pool, of requests or of text.

The warping steps do what transformers' do, in its order: penalties, temperature, top-k, top-p, min-p. Its own sort the
whole vocabulary for each row, which took 5 ms a row; these sort only what may be drawn. Random numbers are keyed by
(seed, position), so a reply does not depend on its neighbours, and one that is preempted goes on as it began.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Draw
from engine.errors import StepError
from engine.protocol import Sampling

COLDEST = 1e-4  # a temperature below it is greedy: dividing by it would overflow
FEW = 4096  # tokens whose weights are summed one by one, to find one of them
PART = 256  # tokens whose weights are summed at once, to look for a token in one part alone

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of `logits` [rows, vocabulary]; row i belongs to `draws[i]`.

    Raises `StepError` when the logits hold NaN: such a step has no honest answer.
    """
    if logits.device.type == "cpu":
        logits = logits.float()  # numpy knows no bfloat16
    ids = _largest(logits)
    rows = [row for row, draw in enumerate(draws) if not _is_plain_greedy(draw.sampling)]
    if rows:
        scores = logits if len(rows) == len(draws) else logits[rows]
        drawn = _draw_rows(scores.float().cpu(), [draws[row] for row in rows])
        for row, token_id in zip(rows, drawn, strict=True):
            ids[row] = token_id
    return ids


def _largest(logits: torch.Tensor) -> list[int]:
    """The first of the largest of each row, which is NaN where any is."""
    # On the CPU numpy takes a tenth of torch's time for it, in bfloat16 with the conversion.
    on_cpu = logits.device.type == "cpu"
    ids = torch.from_numpy(logits.numpy().argmax(axis=-1)) if on_cpu else logits.argmax(dim=-1)
    if logits.gather(-1, ids[:, None]).isnan().any():
        raise StepError("the model returned logits that are not numbers (NaN)")
    found: list[int] = ids.tolist()
    return found


def _is_plain_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < COLDEST and not _penalises(sampling)


def _penalises(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _draw_rows(scores: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of `scores` [rows, vocabulary], float32."""
    if any(_penalises(draw.sampling) for draw in draws):
        scores = scores.clone()
        for row, draw in zip(scores.numpy(), draws, strict=True):
            _penalise(row, draw)
    colds = [1 / max(draw.sampling.temperature, COLDEST) for draw in draws]
    weights = (scores * torch.tensor(colds)[:, None]).softmax(dim=-1)  # of all rows at once, which takes half the time
    return [_draw(*row) for row in zip(scores.numpy(), weights.numpy(), draws, strict=True)]


def _draw(scores: Floats, weights: Floats, draw: Draw) -> int:
    """A token of one row [vocabulary], whose probabilities are `weights` before anything is cut off."""
    sampling = draw.sampling
    if sampling.temperature < COLDEST:
        return int(scores.argmax())
    ids: Ids | None = None  # those that are left; None: all
    if 0 < sampling.top_k < len(scores):
        ids = np.flatnonzero(scores >= np.partition(scores, -sampling.top_k)[-sampling.top_k])
        weights = weights[ids]
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if sampling.min_p > 0:
        kept = np.flatnonzero(weights >= np.float32(sampling.min_p) * weights.max())
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    place = _place(weights, uniform(draw.seed, draw.position))
    return place if ids is None else int(ids[place])


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """The largest weights, as few as it takes to have `top_p` of their sum; of equal ones, the first stay longest."""
    total = float(weights.sum())
    spare = (1 - top_p) * total
    # All that are no larger than an equal share of what may go can go together, so that only few are sorted.
    ids = np.flatnonzero(weights > np.float32(min(spare / len(weights), weights.max() / 2)))
    few = weights[ids]
    ranked = np.sort(few)
    sums = ranked.cumsum(dtype=np.float64)
    gone = min(int(sums.searchsorted(spare - (total - sums[-1]), side="right")), len(ranked) - 1)
    least = ranked[gone]
    kept = few >= least
    if again := gone - int(ranked.searchsorted(least)):  # of those that weigh as much as the last one that stays
        kept[np.flatnonzero(few == least)[-again:]] = False
    nucleus: Ids = ids[kept]
    return nucleus


def _place(weights: Floats, point: float) -> int:
    """The first place at which the weights up to it exceed the share `point`, in [0, 1), of their sum.

    A weight of zero adds nothing, so its place is never it.
    """
    if len(weights) <= FEW:
        sums = weights.cumsum(dtype=np.float64)
        return int(sums.searchsorted(point * sums[-1], side="right"))
    ends = np.add.reduceat(weights, np.arange(0, len(weights), PART)).cumsum(dtype=np.float64)
    wanted = point * ends[-1]
    part = int(ends[:-1].searchsorted(wanted, side="right"))
    sums = weights[part * PART : (part + 1) * PART].cumsum(dtype=np.float64)
    rest = wanted - (ends[part - 1] if part else 0.0)
    place = sums.searchsorted(min(rest, np.nextafter(sums[-1], 0)), side="right")  # rounded, it may be beyond the sum
    return part * PART + int(place)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the seed (64 bits) and the position in the sequence."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position).random_raw()
    return float((int(bits) >> 11) * 2.0**-53)  # what numpy's Generator makes of them


def _penalise(scores: Floats, draw: Draw) -> None:
    """Change one row's scores [vocabulary] as the penalties have it."""
    sampling = draw.sampling
    if sampling.repetition_penalty != 1:
        seen = np.array([*draw.prompt_ids, *draw.reply_ids])
        found = scores[seen]
        scores[seen] = np.where(found < 0, found * sampling.repetition_penalty, found / sampling.repetition_penalty)
    if draw.reply_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(np.array(draw.reply_ids), return_counts=True)
        scores[ids] -= counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
        scores[ids] -= np.float32(sampling.presence_penalty)

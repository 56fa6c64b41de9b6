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
USUAL = 1000  # a token that weighs less than this part of what may go is seldom among those that stay
_MASK = 2**64 - 1
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157  # Philox 4x64, as in numpy
_WEYL = [(i * 0x9E3779B97F4A7C15 & _MASK, i * 0xBB67AE8584CAA73B & _MASK) for i in range(10)]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of `logits` [rows, vocabulary]; row i belongs to `draws[i]`.

    Raises `StepError` when the logits hold NaN: such a step has no honest answer.
    """
    rows = [row for row, draw in enumerate(draws) if not _is_plain_greedy(draw.sampling)]
    if len(rows) == len(draws):
        return _draw_rows(logits, draws)
    ids = _largest(logits)
    if rows:
        for row, token_id in zip(rows, _draw_rows(logits[rows], [draws[row] for row in rows]), strict=True):
            ids[row] = token_id
    return ids


def _largest(logits: torch.Tensor) -> list[int]:
    """The first of the largest of each row, which is NaN where any is."""
    if logits.device.type == "cpu":  # numpy takes a tenth of torch's time for it, in bfloat16 with the conversion
        scores = logits.float().numpy()
        ids = scores.argmax(axis=-1)
        _check(scores[np.arange(len(ids)), ids])
    else:
        largest = logits.argmax(dim=-1, keepdim=True)
        ids = largest.flatten().cpu().numpy()
        _check(logits.gather(-1, largest).float().cpu().numpy())
    found: list[int] = ids.tolist()
    return found


def _check(numbers: Floats) -> None:
    if np.isnan(numbers).any():
        raise StepError("the model returned logits that are not numbers (NaN)")


def _is_plain_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < COLDEST and not _penalises(sampling)


def _penalises(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _draw_rows(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of `logits` [rows, vocabulary]."""
    scores = logits.float().cpu()
    if any(_penalises(draw.sampling) for draw in draws):
        scores = scores.clone()
        for row, draw in zip(scores.numpy(), draws, strict=True):
            _penalise(row, draw)
    colds = torch.tensor([1 / max(draw.sampling.temperature, COLDEST) for draw in draws])[:, None]
    weights = (scores * colds).softmax(dim=-1).numpy()  # of all rows at once, on all threads
    _check(weights[:, 0])  # one that is not a number spoils its row
    return [_draw(*row) for row in zip(scores.numpy(), weights, draws, strict=True)]


def _draw(scores: Floats, weights: Floats, draw: Draw) -> int:
    """A token of one row [vocabulary], whose probabilities are `weights` before anything is cut off."""
    sampling = draw.sampling
    if sampling.temperature < COLDEST:
        return int(scores.argmax())
    ids: Ids | None = None  # those that are left; None: all
    total = 1.0
    if 0 < sampling.top_k < len(scores):
        ids = _best(scores, sampling.top_k)
        weights = weights[ids]
        total = float(weights.sum())
    if sampling.top_p < 1:
        kept = _nucleus(weights, total, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if sampling.min_p > 0:
        kept = np.flatnonzero(weights >= np.float32(sampling.min_p) * weights.max())
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    place = _place(weights, uniform(draw.seed, draw.position))
    return place if ids is None else int(ids[place])


def _best(scores: Floats, count: int) -> Ids:
    """The `count` largest, and those that equal the last of them."""
    if count > len(scores) // PART:
        return np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    # So many parts have a token that is no less than the least of their largest: all the others can go unsorted.
    largest = np.maximum.reduceat(scores, np.arange(0, len(scores), PART))
    ids = np.flatnonzero(scores >= np.partition(largest, -count)[-count])
    few = scores[ids]
    best: Ids = ids[few >= np.partition(few, -count)[-count]]
    return best


def _nucleus(weights: Floats, total: float, top_p: float) -> Ids:
    """The largest weights, as few as it takes to have `top_p` of their `total`; of equal ones, the first stay longest.

    Only few are sorted: all that are less than an equal share of what may go can go together, and mostly many more.
    """
    for parts in (USUAL, 2 * len(weights)):
        ids = np.flatnonzero(weights > np.float32((1 - top_p) * total / parts))
        few = weights[ids]
        ranked = np.sort(few)[::-1]
        count = int(ranked.cumsum(dtype=np.float64).searchsorted(top_p * total)) + 1
        if count <= len(few):
            break
    else:
        return ids  # rounded, all together are less than that
    least = ranked[count - 1]
    kept = few >= least
    if more := np.count_nonzero(kept) - count:  # of those that weigh as much as the last one that stays
        kept[np.flatnonzero(few == least)[-more:]] = False
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
    """A number in [0, 1) that depends on nothing but the seed (64 bits) and the position in the sequence.

    It is the first of numpy's `Philox(key=seed, counter=position)`, which takes three times as long to make.
    """
    one, two = _MULTIPLIERS
    a, b, c, d = position + 1, 0, 0, 0
    for first, second in _WEYL:
        left, right = one * a, two * c
        a, b, c, d = (right >> 64) ^ b ^ (seed + first & _MASK), right & _MASK, (left >> 64) ^ d ^ second, left & _MASK
    return float((a >> 11) * 2.0**-53)  # what numpy's Generator makes of them


def _penalise(scores: Floats, draw: Draw) -> None:
    """Change one row's scores [vocabulary] as the penalties have it."""
    sampling = draw.sampling
    if sampling.repetition_penalty != 1:
        seen = np.array([*draw.prompt_ids, *draw.reply_ids], dtype=np.int64)
        found = scores[seen]
        scores[seen] = np.where(found < 0, found * sampling.repetition_penalty, found / sampling.repetition_penalty)
    if draw.reply_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(np.array(draw.reply_ids), return_counts=True)
        scores[ids] -= counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
        scores[ids] -= np.float32(sampling.presence_penalty)

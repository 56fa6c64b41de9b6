"""Choose tokens from logits. Knows rows of numbers and `Draw`s; nothing of the pool, of requests or of text.

The warping steps do what transformers' do, in its order: penalties, temperature, top-k, top-p, min-p. Its own sort the
whole vocabulary for each row, which took 5 ms a row. Here only tokens near the likeliest are weighed and sorted, where
that leaves no doubt about who is drawn; for other rows all are weighed, and only those that may be drawn are sorted.
Random numbers are keyed by (seed, position), so a reply does not depend on its neighbours, and one that is preempted
goes on as it began.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Draw
from engine.errors import StepError
from engine.protocol import Sampling

COLDEST = 1e-4  # a temperature below it is greedy: dividing by it would overflow
ROWS = 16  # that are looked at together
COOL = 0.8  # a temperature up to which few tokens are near the likeliest one
FAR = 5.0  # those that are not near weigh exp(-FAR) of the likeliest at most, all together
SPARSE = 16  # of so many tokens one may be near, or weighing all is as quick
USUAL = 1000  # a token that weighs less than this part of what may go is seldom among those that stay
FEW = 4096  # tokens whose weights are summed one by one, to find one of them
PART = 256  # tokens whose weights are summed at once, to look for a token in one part alone
BROKEN = "the model returned logits that are not numbers (NaN)"
_MASK = 2**64 - 1
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157  # Philox 4x64, as in numpy
_WEYL = [(i * 0x9E3779B97F4A7C15 & _MASK, i * 0xBB67AE8584CAA73B & _MASK) for i in range(10)]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class _Room(threading.local):
    """Memory for `ROWS` rows, kept from step to step: fresh memory takes longer than what is done in it.

    Each thread has its own. Arrays, because a tensor that is made in inference mode cannot be written to outside of it.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Floats] = {}

    def of(self, name: str, rows: int, vocabulary: int) -> Floats:
        """The array of this name, [rows, vocabulary], with whatever is in it."""
        array = self._arrays.get(name)
        if array is None or len(array) < rows or array.shape[1] != vocabulary:
            array = self._arrays[name] = np.empty((rows, vocabulary), dtype=np.float32)
        return array[:rows]


_room = _Room()


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of `logits` [rows, vocabulary]; row i belongs to `draws[i]`.

    Raises `StepError` when the logits hold NaN: such a step has no honest answer.
    """
    rows = [row for row, draw in enumerate(draws) if not _is_plain_greedy(draw.sampling)]
    ids = [0] * len(draws) if len(rows) == len(draws) else _largest(logits)
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        drawn = _draw_rows(_scores(logits if len(some) == len(draws) else logits[some]), [draws[row] for row in some])
        for row, token_id in zip(some, drawn, strict=True):
            ids[row] = token_id
    return ids


def _scores(logits: torch.Tensor) -> Floats:
    """These rows as numpy can read them."""
    if logits.dtype == torch.float32 and logits.device.type == "cpu":
        return logits.numpy()
    scores = _room.of("scores", *logits.shape)
    torch.from_numpy(scores).copy_(logits)
    return scores


def _largest(logits: torch.Tensor) -> list[int]:
    """The first of the largest of each row, which is NaN where any is."""
    if logits.device.type == "cpu":  # numpy takes a tenth of torch's time for it, in bfloat16 with the conversion
        scores = logits.float().numpy()
        ids = scores.argmax(axis=-1)
        broken = np.isnan(scores[np.arange(len(ids)), ids]).any()
    else:
        largest = logits.argmax(dim=-1, keepdim=True)
        broken = logits.gather(-1, largest).isnan().any()
        ids = largest.flatten().cpu().numpy()
    if broken:
        raise StepError(BROKEN)
    found: list[int] = ids.tolist()
    return found


def _is_plain_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < COLDEST and not _penalises(sampling)


def _penalises(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _weighs_all(sampling: Sampling) -> bool:
    """Whether it takes the weights of all tokens to draw one."""
    few = sampling.top_k > 0 or sampling.min_p > 0 or (sampling.top_p < 1 and sampling.temperature <= COOL)
    return sampling.temperature >= COLDEST and not few


def _draw_rows(table: Floats, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of `table` [rows, vocabulary]."""
    ids: list[int] = []
    unsure: list[tuple[int, Floats]] = []
    for row, draw in enumerate(draws):
        scores = _penalised(table[row], draw) if _penalises(draw.sampling) else table[row]
        found = None if _weighs_all(draw.sampling) else _draw_near(scores, draw)
        ids.append(found or 0)
        if found is None:
            unsure.append((row, scores))
    if unsure:
        room = _room.of("weights", len(unsure), table.shape[1])
        for (row, scores), warm in zip(unsure, room, strict=True):
            np.multiply(scores, np.float32(1 / draws[row].sampling.temperature), out=warm)
        tensor = torch.from_numpy(room)
        torch.softmax(tensor, dim=-1, out=tensor)  # of all rows at once, on all threads
        for (row, scores), weights in zip(unsure, room, strict=True):
            ids[row] = _largest_of(scores)[0] if np.isnan(weights[0]) else _draw(weights, draws[row])
    return ids


def _largest_of(scores: Floats) -> tuple[int, np.float32]:
    """The first of the largest of one row, and its score."""
    largest = int(scores.argmax())
    top: np.float32 = scores[largest]
    if np.isnan(top):
        raise StepError(BROKEN)
    return largest, top


def _draw_near(scores: Floats, draw: Draw) -> int | None:
    """A token of one row [vocabulary] that takes the weights of few; None: it takes all."""
    sampling, rest = draw.sampling, 0.0
    largest, top = _largest_of(scores)
    if sampling.temperature < COLDEST or np.isinf(top):
        return largest
    if 0 < sampling.top_k < len(scores):
        ids = _best(scores, sampling.top_k)
    elif sampling.top_p < 1:
        reach = math.log(len(scores)) + FAR
        near = scores > top - np.float32(reach * sampling.temperature)
        count = int(np.count_nonzero(near))
        if count * SPARSE > len(scores):
            return None
        ids, rest = np.flatnonzero(near), (len(scores) - count) * math.exp(-reach)
    elif sampling.min_p > 0:  # and some that are less by a hair
        ids = np.flatnonzero(scores >= top + np.float32((math.log(sampling.min_p) - 0.1) * sampling.temperature))
    else:
        return None
    weights = scores[ids] - top
    weights *= np.float32(1 / sampling.temperature)
    np.exp(weights, out=weights)
    if sampling.top_p < 1:
        kept = _nucleus(weights, float(weights.sum()), sampling.top_p, rest)
        if not len(kept):
            return None
        ids, weights = ids[kept], weights[kept]
    return int(ids[_draw_of(weights, draw)])


def _draw(weights: Floats, draw: Draw) -> int:
    """A token of one row [vocabulary], whose probabilities are `weights` before anything is cut off."""
    if draw.sampling.top_p >= 1:
        return _draw_of(weights, draw)
    kept = _nucleus(weights, 1.0, draw.sampling.top_p)
    return int(kept[_draw_of(weights[kept], draw)])


def _draw_of(weights: Floats, draw: Draw) -> int:
    """The place of one of those that are left, of which min-p may leave fewer."""
    point = uniform(draw.seed, draw.position)
    if not draw.sampling.min_p:
        return _place(weights, point)
    kept = np.flatnonzero(weights >= np.float32(draw.sampling.min_p) * weights.max())
    return int(kept[_place(weights[kept], point)])


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


def _nucleus(weights: Floats, total: float, top_p: float, rest: float = 0.0) -> Ids:
    """The largest weights, as few as it takes to have `top_p` of their `total`; of equal ones, the first stay longest.

    Others, smaller than all of them, weigh up to `rest` more; none: it depends on those. Only few are sorted: all that
    are less than an equal share of what may go can go together, and mostly many more.
    """
    for parts in (USUAL, 2 * len(weights)):
        ids = np.flatnonzero(weights > np.float32((1 - top_p) * total / parts))
        few = weights[ids]
        ranked = np.sort(few)[::-1]
        sums = ranked.cumsum(dtype=np.float64)
        count = int(sums.searchsorted(top_p * total)) + 1
        if count <= len(few):
            break
    else:
        return ids[:0] if rest else ids  # rounded, all together are less than that
    if rest and sums[count - 1] < top_p * (total + rest):
        return ids[:0]
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


def _penalised(scores: Floats, draw: Draw) -> Floats:
    """One row's scores [vocabulary] as the penalties have it."""
    sampling, scores = draw.sampling, scores.copy()
    if sampling.repetition_penalty != 1:
        seen = np.array([*draw.prompt_ids, *draw.reply_ids], dtype=np.int64)
        found = scores[seen]
        scores[seen] = np.where(found < 0, found * sampling.repetition_penalty, found / sampling.repetition_penalty)
    if draw.reply_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(np.array(draw.reply_ids), return_counts=True)
        scores[ids] -= counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
        scores[ids] -= np.float32(sampling.presence_penalty)
    return scores

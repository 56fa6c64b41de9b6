"""Weights in the layouts that the processor multiplies by, laid out once instead of at every call.

bfloat16 is laid out for oneDNN. Measured with the embedded model on two cores with AMX, all its matrices: 20 instead of
30 ms for a token, 30 instead of 40 ms for forty; from 512 on there is no difference. Weights of 4 or 8 bits are in
`engine.model.quantised` where the processor multiplies bfloat16, and in `engine.model.compact` where it does not. This
module knows which layers take which layout; other dtypes and devices have their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.codes import FILES, own_bits, quantise
from engine.model.compact import CompactLinear
from engine.model.kernels import Kernels
from engine.model.quantised import QuantisedLinear, can_hold
from engine.model.tiles import BF16

Weights = Literal["auto", "bf16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}
COMFORT = 1.5  # so many times what copies take must be free for them

_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_multiply = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """What an `nn.Linear` computes, to rounding. Its own weight is let go; `weight` lays it out again."""

    def __init__(self, weight: torch.Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = nn.Parameter(_reorder(weight.detach(), None), requires_grad=False)
        self.bias = bias

    @property
    def weight(self) -> torch.Tensor:
        """The weight as `nn.Linear` has it, [out, in]: for a model that looks at it, not for every step."""
        return self.packed.detach().to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]."""
        result: torch.Tensor = _multiply(x, self.packed, self.bias, "none", [], "")
        return result


def pack(model: nn.Module, weights: Weights, free: int) -> int:
    """Have the linear layers of a bfloat16 model in RAM compute with packed weights.

    "auto" gives each layer the bits that its numbers already have, so that nothing is lost; "int8" and "int4" are the
    most that a layer has, but for the output layer, which is given no fewer than 8. They are for few rows; for more
    there is a bfloat16 copy of each, and a packed one of an output layer that shares the embedding's weight, unless
    those are more than `free` bytes hold comfortably. Returns the bytes of the copies there was no room for.

    What else shares its weight stays as it is: it would be there twice. So does what is no plain `nn.Linear`, and what
    something listens to.
    """
    layers = dict(_layers(model))
    own = {name: own_bits(layer.weight) if _quantises(layer, weights) else None for name, layer in layers.items()}
    bits = {name: _bits(model, layer, weights, own[name]) for name, layer in layers.items()}
    twice = sum(layer.weight.nbytes for name, layer in layers.items() if bits[name] or _is_embedding(model, layer))
    copies = COMFORT * twice <= free
    for name in list(layers):
        layer = layers.pop(name)
        if found := bits[name]:
            model.set_submodule(name, _quantised(layer, found, exact=own[name] == found, copies=copies))
        elif copies or not _is_embedding(model, layer):
            model.set_submodule(name, PackedLinear(layer.weight, layer.bias))
    return 0 if copies else twice


def compact(model: nn.Module, weights: Weights, kernels: Kernels) -> None:
    """Have the linear layers of a model in RAM compute with weights of fewer bits than its dtype has, by these kernels.

    `weights` and what stays as it is are as `pack` has them; bfloat16 is 16 bits, which a float32 weight may have too.
    """
    layers = dict(_layers(model))
    for name in list(layers):
        layer = layers.pop(name)
        if not can_hold(layer.weight):
            continue
        own = own_bits(layer.weight, FILES) or _bf16_of(layer.weight)
        if weights == "bf16":
            bits: int | None = BF16
        else:
            bits = own if weights == "auto" else _at_most(model, layer, BITS[weights], own)
        if bits is not None:
            its = CompactLinear.of(layer.weight, bits, layer.bias, kernels, exact=own == bits)
            model.set_submodule(name, its)


def layouts(model: nn.Module) -> dict[str, int]:
    """The bits of each layer that has fewer than the dtype's, by its name."""
    return {
        name: each.bits for name, each in model.named_modules() if isinstance(each, QuantisedLinear | CompactLinear)
    }


def called(model: nn.Module, dtype: str) -> str:
    """What most of the numbers of a model's linear layers are: "int4", "int8", "bf16", or the dtype's name."""
    numbers: Counter[str] = Counter()
    for each in model.modules():
        if isinstance(each, QuantisedLinear | CompactLinear):
            its = "bf16" if each.bits == BF16 else f"int{each.bits}"
            numbers[its] += each.in_features * each.out_features
            if isinstance(each, QuantisedLinear) and each.many is not None:  # which is a module of its own
                numbers[dtype] -= each.in_features * each.out_features
        elif isinstance(each, PackedLinear | nn.Linear):
            numbers[dtype] += each.in_features * each.out_features
    return max(numbers, key=numbers.__getitem__, default=dtype)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or _is_listened_to(module):
            continue
        if owners[id(module.weight)] == 1 or _is_embedding(model, module):
            yield name, module


def _is_embedding(model: nn.Module, layer: nn.Linear) -> bool:
    """Whether it is the output layer with the embedding's weight."""
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    return _is_output(model, layer) and layer.weight is getattr(embedding, "weight", None)


def _is_output(model: nn.Module, layer: nn.Linear) -> bool:
    return isinstance(model, PreTrainedModel) and model.get_output_embeddings() is layer


def _quantises(layer: nn.Linear, weights: Weights) -> bool:
    return weights != "bf16" and can_hold(layer.weight)


def _bits(model: nn.Module, layer: nn.Linear, weights: Weights, own: int | None) -> int | None:
    """The bits that a layer is to have, whose numbers have `own`; None: those of bfloat16."""
    if not _quantises(layer, weights) or weights == "auto":
        return own
    return _at_most(model, layer, BITS[weights], own)


def _at_most(model: nn.Module, layer: nn.Linear, most: int, own: int | None) -> int:
    """So many bits, or as few as its numbers have; an output layer is given no fewer than 8."""
    most = 8 if _is_output(model, layer) else most
    return min(most, own or most)


def _bf16_of(weight: torch.Tensor) -> int | None:
    """16 where all the numbers of a weight are bfloat16's."""
    return BF16 if torch.equal(weight.bfloat16().to(weight.dtype), weight) else None


def _quantised(layer: nn.Linear, bits: int, *, exact: bool, copies: bool) -> QuantisedLinear:
    """`exact`: its numbers have so many bits, so that codes say what it has."""
    codes = quantise(layer.weight, bits, exact=exact)
    if not copies:
        return QuantisedLinear(codes, layer.bias, None)
    if not exact:
        layer.weight = nn.Parameter(codes.numbers().to(layer.weight.dtype), requires_grad=False)
    return QuantisedLinear(codes, layer.bias, PackedLinear(layer.weight, layer.bias))


def _is_listened_to(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)

"""How much work a chat template can make: whether all its loops go over the messages, so that it must come to an end.

Knows nothing of rendering. A template of which this cannot be said may still be harmless; it is watched instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE

GIVEN = frozenset({"messages", "tools", "documents"})  # lists that every template is given, or None
CALLED = frozenset({"raise_exception", "strftime_now", "namespace"})
FILTERS = frozenset(
    {"trim", "length", "count", "tojson", "string", "upper", "lower", "capitalize", "title", "first", "last"}
) | {"default", "d", "replace", "safe", "e", "escape"}  # those that look at what they are given once
UNKNOWN = frozenset(DEFAULT_NAMESPACE) - CALLED  # what else a template could call: range, lipsum, …
MOST_DEEP = 2  # loops inside each other: over the messages, and over a part of one of them
UNSURE: tuple[type[nodes.Node], ...] = (
    *(nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.With, nodes.Mul, nodes.Pow),
    *(nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block),
)


def only_over_messages(tree: nodes.Template) -> bool:
    """Whether a template's steps grow with its messages alone.

    Each loop goes over the messages or some of them, or inside such a loop over a part of the one it is at; and nothing
    else in the template can take long.
    """
    if any(tree.find_all(UNSURE)) or not all(_is_quick(call) for call in tree.find_all(nodes.Call)):
        return False
    if any(each.name not in FILTERS for each in tree.find_all(nodes.Filter)):
        return False
    if any(name.name in UNKNOWN for name in tree.find_all(nodes.Name)):
        return False
    set_to: dict[str, list[nodes.Node]] = {}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            set_to.setdefault(assign.target.name, []).append(assign.node)
        elif not isinstance(assign.target, nodes.NSRef):
            return False
    lists = {name for name in {*GIVEN, *set_to} if _is_list(name, set_to, frozenset())}
    return all(_is_bounded(loop, lists, set_to) for loop in _outermost(tree))


def _is_quick(call: nodes.Call) -> bool:
    """Whether a call is one that a template may make of what it is given, or a method's."""
    return isinstance(call.node, nodes.Getattr) or (isinstance(call.node, nodes.Name) and call.node.name in CALLED)


def _is_list(name: str, set_to: dict[str, list[nodes.Node]], seen: frozenset[str]) -> bool:
    """Whether a name stands for a given list or a part of one, wherever it is set."""
    if name in seen or (name not in GIVEN and name not in set_to):
        return False
    roots = [_root(value) for value in set_to.get(name, [])]
    return all(root is not None and _is_list(root, set_to, seen | {name}) for root in roots)


def _is_bounded(loop: nodes.For, lists: set[str], set_to: dict[str, list[nodes.Node]], depth: int = 1) -> bool:
    root = _root(loop.iter)
    if loop.recursive or depth > MOST_DEEP or root is None or root not in lists:
        return False
    targets = {name.name for name in loop.target.find_all(nodes.Name)}
    targets |= {loop.target.name} if isinstance(loop.target, nodes.Name) else set()
    inner = targets - set(set_to)
    return not targets & lists and all(_is_bounded(each, inner, set_to, depth + 1) for each in _outermost(loop))


def _root(value: nodes.Node) -> str | None:
    """The name that an expression takes a part of; None where it makes something else."""
    while isinstance(value, nodes.Getitem | nodes.Getattr):
        value = value.node
    return value.name if isinstance(value, nodes.Name) else None


def _outermost(node: nodes.Node) -> Iterator[nodes.For]:
    """The loops in a node that are in no other loop in it."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.For):
            yield child
        else:
            yield from _outermost(child)

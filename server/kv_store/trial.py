"""How a model's caches behave, found out with a few tokens.

Owns nothing after `learn` returns. Runs in the engine's main thread before the loop. A cache *grows* if each of its
arrays has an axis that gets longer with the tokens, keeps what it holds of earlier positions, and every number around
them is the same at all lengths or is the length. All other caches are of constant size; of these one is a *state* whose
arrays keep their forms while nothing around them changes, as a recurrent layer's does.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from server.cache_guard import Caches, cache_arrays, parts
from server.compute.merged_caches import merged
from server.compute.rows import Model
from server.ipc.probe import GROWTH
from server.kv_store.layout import Layout, LeafLayout, PartLayout, StateLayout, Tree
from server.kv_store.trees import Leaves, at, dismantle, with_lengths

_SHORT, _LONG = 5, GROWTH + 1  # tokens read before a step; the longer ones make arrays grow that have room to spare
_WINDOWS = ("max_size", "chunk_size")  # attributes that say after how many positions a cache drops its oldest

log = logging.getLogger("marathon.engine")


def learn(model: Model, *, batches: bool) -> Layout:
    """The layout of the model's caches; `batches`: whether its rows may be merged. Raises UnknownCache."""
    short = _stepped(model, _SHORT)
    long = _stepped(model, _LONG)  # of these only shapes matter, which a graph has before it runs
    learned = _settled(model, [_part(a, b) for a, b in zip(parts(short), parts(long), strict=True)])
    if batches:
        learned = _with_ends(model, learned)
    return Layout(tuple(learned))


def _stepped(model: Model, length: int) -> Caches:
    caches: Caches = make_prompt_cache(model)
    model(mx.array([_filler(length)]), cache=caches)
    model(mx.array([[1]]), cache=caches)
    return caches


def _filler(length: int) -> list[int]:
    return [i % 50 + 1 for i in range(length)]


def _part(short: Any, long: Any) -> PartLayout:
    tree_short, leaves = dismantle(short)
    tree_long, later = dismantle(long)
    tree = with_lengths(tree_short, tree_long, (_SHORT + 1, _LONG + 1))
    turns = any(getattr(short, name, None) for name in _WINDOWS)
    grown = _leaves(leaves, later, turns=turns)
    kind = type(short).__name__
    constant = tuple((_name(array), array.shape) for array in leaves.arrays)
    if tree is None or grown is None:
        return PartLayout(kind, constant=constant, state=_state((tree_short, leaves), (tree_long, later)))
    return PartLayout(kind, tree, grown, constant, turns)


def _state(short: tuple[Tree, Leaves], long: tuple[Tree, Leaves]) -> StateLayout | None:
    """What a cache of constant size is around its arrays; None if that changes with the tokens, or their forms do."""
    (tree, leaves), (later_tree, later) = short, long
    forms = [[(array.dtype, array.shape) for array in one.arrays] for one in (leaves, later)]
    if tree != later_tree or forms[0] != forms[1] or any(array.shape[:1] != (1,) for array in leaves.arrays):
        return None
    return StateLayout(tree, tuple(leaves.paths))


def _leaves(short: Leaves, long: Leaves, *, turns: bool) -> tuple[LeafLayout, ...] | None:
    """The arrays of a cache that grows; None if one of them doesn't, or along two axes."""
    found = []
    for path, before, after in zip(short.paths, short.arrays, long.arrays, strict=False):
        axes = [i for i, (a, b) in enumerate(zip(before.shape, after.shape, strict=False)) if a != b]
        if len(axes) != 1 or before.ndim != after.ndim or before.dtype != after.dtype:
            return None
        step = 1
        if before.shape[axes[0]] > _SHORT + 1 and not turns:  # a window that turns has no more room than its size
            step = before.shape[axes[0]]
        found.append(LeafLayout(path, _name(before), before.shape, axes[0], step))
    return tuple(found)


def _name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _settled(model: Model, learned: list[PartLayout]) -> list[PartLayout]:
    """Take those for constant that don't keep what they hold of the first positions when another token is read."""
    caches: Caches = make_prompt_cache(model)
    model(mx.array([_filler(_SHORT)]), cache=caches)
    before = [_first(part, own) for part, own in zip(learned, parts(caches), strict=True)]
    mx.eval(before, cache_arrays(caches))
    model(mx.array([[1]]), cache=caches)
    after = [_first(part, own) for part, own in zip(learned, parts(caches), strict=True)]
    mx.eval(after, cache_arrays(caches))
    return [
        part if _are_equal(a, b) else PartLayout(part.kind, constant=part.constant)
        for part, a, b in zip(learned, before, after, strict=True)
    ]


def _first(part: PartLayout, own: Any) -> list[mx.array]:
    """Copies of the first positions of a cache that grows."""
    return [mx.array(cut(at(own, leaf.path), leaf.axis, 0, _SHORT)) for leaf in part.leaves]


def _are_equal(before: list[mx.array], after: list[mx.array]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(before, after, strict=True))


# ---------------------------------------------------------------- merged
def _with_ends(model: Model, learned: list[PartLayout]) -> list[PartLayout]:
    """Find out where in a merged cache a row's positions and its state lie, so that they can be copied without the
    others. Where that doesn't show the row is extracted."""
    try:
        layers, lengths = _merged_pair(model)
        return [_found(part, own, lengths) for part, own in zip(learned, parts(layers), strict=True)]
    except Exception as error:  # a model's own code, which may do anything
        log.debug("rows can't be found in merged caches: %s", error)
        return learned


def _found(part: PartLayout, own: Any, lengths: list[int]) -> PartLayout:
    if part.state is not None:
        is_by_row = all(_is_state(part.state, own, row) for row in range(len(lengths)))
        return replace(part, state=replace(part.state, is_by_row=is_by_row))
    return replace(part, merged_end=_merged_end(part, own, lengths))


def _is_state(state: StateLayout, own: Any, row: int) -> bool:
    """Whether a row's state is at its place in the arrays of the merged cache."""
    tree, leaves = dismantle(own.extract(row))
    if tree != state.tree or tuple(leaves.paths) != state.paths:
        return False
    return _are_equal(leaves.arrays, [at(own, path)[row : row + 1] for path in state.paths])


def _merged_pair(model: Model) -> tuple[Caches, list[int]]:
    """Two rows of different lengths after a step together, and how many positions each holds."""
    lengths = [_SHORT, 2 * _SHORT]
    singles = []
    for length in lengths:
        caches: Caches = make_prompt_cache(model)
        model(mx.array([_filler(length)]), cache=caches)
        mx.eval(cache_arrays(caches))
        singles.append(caches)
    together = merged(singles)
    model(mx.array([[1], [2]]), cache=together)
    mx.eval(cache_arrays(together))
    return together, [length + 1 for length in lengths]


def _merged_end(part: PartLayout, own: Any, lengths: list[int]) -> str | None:
    """The attribute that says where the rows end, if each row's positions are found right before."""
    if not part.grows or part.turns or not part.leaves:
        return None
    names = [name for name, value in vars(own).items() if type(value) is int and value == max(lengths)]
    return next((name for name in names if _is_end(part, own, name, lengths)), None)


def _is_end(part: PartLayout, own: Any, name: str, lengths: list[int]) -> bool:
    return all(_is_found(part, own, getattr(own, name), row, length) for row, length in enumerate(lengths))


def _is_found(part: PartLayout, own: Any, end: int, row: int, length: int) -> bool:
    single = own.extract(row)
    for leaf in part.leaves:
        alone = cut(at(single, leaf.path), leaf.axis, 0, length)
        if not mx.array_equal(alone, merged_positions(own, leaf, row, end - length, end)).item():
            return False
    return True


def cut(array: mx.array, axis: int, first: int, last: int) -> mx.array:
    """`array` from `first` to `last` on one axis."""
    return array[(slice(None),) * axis + (slice(first, last),)]


def merged_positions(own: Any, leaf: LeafLayout, row: int, first: int, last: int) -> mx.array:
    """Some positions of one row of a merged cache."""
    return cut(at(own, leaf.path)[row : row + 1], leaf.axis, first, last)

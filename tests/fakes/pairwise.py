"""Selections from a large test matrix: all pairs of values, or all combinations of the important factors."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return cases that cover every pair of values. The selection is greedy and deterministic, but not minimal."""
    # Pairs of the largest factors decide how many cases there are, so they are chosen first.
    names = sorted(factors, key=lambda name: len(factors[name]), reverse=True)
    missing = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }
    cases = []
    while missing:
        choice: dict[str, int] = {}
        seed_a, seed_i, seed_b, seed_j = min(missing, key=lambda pair: (names.index(pair[0]), pair))
        choice[seed_a], choice[seed_b] = seed_i, seed_j
        for name in names:
            if name not in choice:
                choice[name] = max(
                    range(len(factors[name])), key=lambda value: _gain(missing, names, choice, name, value)
                )
        missing -= _pairs(names, choice)
        cases.append({name: factors[name][choice[name]] for name in names})
    return cases


def all_in_turn(crossed: Mapping[str, Sequence[Any]], turning: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return every combination of some factors. The values of the other factors rotate."""
    cases = [dict(zip(crossed, values, strict=True)) for values in product(*crossed.values())]
    period = 1
    for name, values in turning.items():
        for number, case in enumerate(cases):
            case[name] = values[number // period % len(values)]
        period *= len(values)
    return cases


def _pairs(names: Sequence[str], choice: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
    chosen = [name for name in names if name in choice]
    return {(a, choice[a], b, choice[b]) for a, b in combinations(chosen, 2)}


def _gain(
    missing: set[tuple[str, int, str, int]], names: Sequence[str], choice: Mapping[str, int], name: str, value: int
) -> tuple[int, int]:
    """Return the number of pairs that the value would newly cover. Ties go to the value with the most pairs left."""
    with_value = _pairs(names, {**choice, name: value}) & missing
    open_pairs = sum((a, i) == (name, value) or (b, j) == (name, value) for a, i, b, j in missing)
    return len(with_value), open_pairs

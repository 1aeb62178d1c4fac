"""Several samples in one row: which ones share, as a function of their lengths alone."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put samples into rows of at most `capacity` tokens: first-fit decreasing bin packing.

    It uses at most 11/9 of the fewest possible rows, and one more. The result depends on the arguments alone, so that
    every rank of a job packs alike.

    Args:
        lengths: tokens of each sample, none above `capacity`.
        capacity: tokens of a row.

    Returns:
        Rows of indices into `lengths`, each increasing; the fullest row first, so that neighbours pad little.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, space in enumerate(free) if space >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(capacity)
        rows[row].append(index)
        free[row] -= lengths[index]
    order = sorted(range(len(rows)), key=lambda row: (free[row], row))
    return [sorted(rows[row]) for row in order]

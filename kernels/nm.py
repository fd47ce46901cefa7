"""Which n of each m stay: the rounding step of every n:m method, called dozens of times per matrix."""

import torch

# Above this group length m * (m - 1) / 2 comparisons cost more than one sort of each group.
PAIRWISE_LIMIT = 16


def nm_keep(score: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """Mask of the n largest of each aligned group of m entries along the last dimension.

    score: (..., columns), columns divisible by m, any floating dtype, no NaN. Returns bool, same shape,
    with exactly n True in each group; among equal scores the leftmost stays.
    Raises ValueError when columns is not divisible by m or n is not in 1..m.
    """
    if score.shape[-1] % m or not 0 < n <= m:
        raise ValueError(f"{n}:{m} does not fit {score.shape[-1]} columns")
    groups = score.unflatten(-1, (-1, m))
    if m > PAIRWISE_LIMIT:
        order = groups.argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :n], True)
        return kept.flatten(-2)
    # Rank = how many entries of the group beat this one; each pair is compared once.
    columns = [column.contiguous() for column in groups.unbind(-1)]
    rank = [torch.zeros_like(columns[0], dtype=torch.int8) for _ in range(m)]
    for left in range(m):
        for right in range(left + 1, m):
            right_wins = columns[right] > columns[left]
            rank[left] += right_wins
            rank[right] += ~right_wins
    return torch.stack([r < n for r in rank], dim=-1).flatten(-2)

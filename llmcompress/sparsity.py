"""Sparsity patterns: `n:m` (n KEPT of every m along the input) and unstructured ratios, with exact counts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from llmcompress.errors import BadInput

if TYPE_CHECKING:
    import torch

ACCEPTED = "use n:m with 0 < n < m, n being the number kept (2:4), or the share to remove, 0 <= share < 1 (0.5)"


@dataclass(frozen=True)
class NM:
    """n weights kept of each aligned group of m consecutive inputs of a row."""

    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def share(self) -> Fraction:
        """Share of weights removed."""
        return 1 - Fraction(self.n, self.m)

    def misfit(self, in_features: int) -> str | None:
        """Why a linear of this input width can't take the pattern, or None."""
        if in_features % self.m:
            return f"its input width {in_features} is not divisible by {self.m}"
        return None

    def keep(self, score: torch.Tensor, scope: str = "row") -> torch.Tensor:
        """Boolean mask of what stays, for `score` (m_out, n_in); larger scores stay, ties go to the left.

        `scope` has no meaning here: a group lies inside one row.
        """
        from llmcompress.kernels import nm_keep

        return nm_keep(score, self.n, self.m)

    def holds(self, weight: torch.Tensor) -> bool:
        """True when no aligned group of `weight` (m_out, n_in) has more than n non-zeros."""
        groups = (weight != 0).unflatten(-1, (-1, self.m)).sum(-1)
        return bool((groups <= self.n).all())


@dataclass(frozen=True)
class Unstructured:
    """A share of all weights removed, wherever they stand: exactly round(share * count) zeros."""

    share: Fraction

    def __str__(self) -> str:
        return f"{float(self.share):g}"

    def misfit(self, in_features: int) -> str | None:
        return None

    def zeros(self, count: int) -> int:
        """How many of `count` weights go: exact rational arithmetic, so 0.29 of 100 is 29 and not 28."""
        return round(self.share * count)

    def keep(self, score: torch.Tensor, scope: str = "row") -> torch.Tensor:
        """Boolean mask of what stays, for `score` (m_out, n_in), of exactly `zeros(m_out * n_in)` False.

        scope "matrix" compares all entries; "row" gives each row its share, the remainder spread evenly.
        """
        import torch

        rows, columns = score.shape
        mask = torch.ones_like(score, dtype=torch.bool)
        if scope == "matrix":
            drop = score.flatten().topk(self.zeros(score.numel()), largest=False, sorted=False).indices
            mask.view(-1)[drop] = False
            return mask
        # Row i gets zeros(i + 1 rows) - zeros(i rows): within one of each other, and the total is exact.
        ends = [self.zeros(columns * i) for i in range(rows + 1)]
        counts = torch.tensor([b - a for a, b in zip(ends, ends[1:], strict=False)], device=score.device)
        for count in counts.unique().tolist():
            chosen = (counts == count).nonzero().squeeze(1)
            drop = score[chosen].topk(count, dim=1, largest=False, sorted=False).indices
            mask[chosen] = torch.ones_like(mask[chosen]).scatter_(1, drop, False)
        return mask

    def holds(self, weight: torch.Tensor) -> bool:
        """True when at least the asked number of weights is zero."""
        return int((weight == 0).sum()) >= self.zeros(weight.numel())


Pattern = NM | Unstructured


def parse(text: str | float | Pattern) -> Pattern:
    """`"2:4"` or `0.5` (also as text) to a pattern. Raises BadInput."""
    if isinstance(text, NM | Unstructured):
        return text
    text = str(text).strip()
    if ":" in text:
        n, _, m = text.partition(":")
        if n.isascii() and m.isascii() and n.isdigit() and m.isdigit() and 0 < int(n) < int(m):
            return NM(int(n), int(m))
        raise BadInput(f"sparsity {text!r} is not a pattern; {ACCEPTED}.")
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise BadInput(f"sparsity {text!r} is not a pattern; {ACCEPTED}.") from None
    if not 0 <= share < 1:
        raise BadInput(f"sparsity {text} is out of range; {ACCEPTED}.")
    return Unstructured(share)

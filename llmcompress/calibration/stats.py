"""What is measured on the inputs of a group of linears, added up batch by batch."""

from __future__ import annotations

import torch

from llmcompress.errors import NumericalFailure

# A symmetric product is built in row blocks up to the diagonal; smaller blocks spare more but run slower.
BLOCK = 384


def add_gram(total: torch.Tensor, x: torch.Tensor) -> None:
    """total (n, n) += x^T x for x (tokens, n), on and below the block diagonal only; see `symmetric`."""
    n = len(total)
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        total[start:end, :end].addmm_(x[:, start:end].T, x[:, :end])


def symmetric(total: torch.Tensor) -> torch.Tensor:
    """Fills the upper half of a matrix whose blocks on and below the diagonal are given, in place."""
    for start in range(0, len(total), BLOCK):
        end = start + BLOCK
        square = total[start:end, start:end]
        square.copy_(square.tril() + square.tril(-1).T)
        total[:start, start:end] = total[start:end, :start].T
    return total


class Statistics:
    """Sums over calibration tokens for one input of width n, in float32.

    needs: which of "norms" (sum of squares of each column, (n,)), "gram" (H = X*^T X*), "cross" (A = X^T X*) are
    kept. X are the dense layer's inputs, X* those of the layer as compressed so far, both
    (tokens, n); with a single stream X = X*.
    sample: the first batch's (X, X*), for measuring errors on real tokens.
    """

    def __init__(self, needs: frozenset[str]):
        self.needs = needs
        self.tokens = 0
        self.same = True
        self.sums: dict[str, torch.Tensor] = {}
        self.sample: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, dense: torch.Tensor, compressed: torch.Tensor, same: bool) -> None:
        """dense, compressed: (tokens, n); `same` says that they are equal, so that one product serves all."""
        if not self.needs or not len(compressed):
            return
        x = compressed.float()
        self.tokens += len(x)
        self.same &= same
        if self.sample is None:
            self.sample = (dense[:512], compressed[:512])
        if "norms" in self.needs:
            self._sum("norms", x.shape[1:]).add_(x.square().sum(0))
        if "gram" in self.needs:
            add_gram(self._sum("gram", (x.shape[1], x.shape[1])), x)
        if "cross" in self.needs and not same:
            self._sum("cross", (x.shape[1], x.shape[1])).addmm_(dense.float().T, x)

    def _sum(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.sums:
            self.sums[name] = torch.zeros(shape, device=self.device())
        return self.sums[name]

    def device(self) -> torch.device:
        return self.sample[1].device

    @property
    def norms(self) -> torch.Tensor:
        """Sum of squares of each input column, (n,)."""
        return self.sums["norms"] if "norms" in self.sums else self.gram.diagonal()

    @property
    def gram(self) -> torch.Tensor:
        """H = X*^T X*, (n, n)."""
        return self._whole("gram")

    @property
    def cross(self) -> torch.Tensor:
        """A = X^T X*, (n, n); H itself when both streams are one."""
        return self.gram if self.same else self.sums["cross"]

    def take_gram(self) -> torch.Tensor:
        """H, (n, n), for the caller to overwrite; it and A are gone here."""
        gram = self.gram
        self.sums.clear()
        return gram

    def _whole(self, name: str) -> torch.Tensor:
        key = f"whole {name}"
        if key not in self.sums:
            self.sums[key] = symmetric(self.sums.pop(name))
        return self.sums[key]

    def release(self) -> None:
        """Gives the memory back once the group is solved."""
        self.sums.clear()
        self.sample = None

    def check_finite(self, where: str) -> None:
        """Raises NumericalFailure when an input held NaN or Inf, or overflowed when squared."""
        for total in self.sums.values():
            if not total.isfinite().all():
                raise NumericalFailure(
                    f"the inputs of {where} hold NaN or Inf over the {self.tokens} calibration tokens; check the "
                    "model's dtype (bfloat16 or float32 rather than float16) and its weights."
                )

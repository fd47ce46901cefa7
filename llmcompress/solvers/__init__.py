"""Tensor mathematics of the methods. Symbols: m outputs, n inputs, p tokens; W (m, n) dense, V (m, n) compressed,
X (p, n) dense inputs, X* (p, n) compressed inputs, H = X*^T X* (n, n), A = X^T X* (n, n), C = W A (m, n)."""

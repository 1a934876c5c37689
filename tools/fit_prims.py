#!/usr/bin/env python3
"""Prints the polynomial coefficients of src/ops/prim_math.inc. Needs mpmath.

Each is a weighted minimax fit by Remez's exchange in 60 digits. The coefficients become f32 one after the other,
lowest order first, what follows being fitted again to what each rounding left; where the weight vanishes inside
the interval (log) they are rounded all at once instead.
"""
import struct
from mpmath import mp, mpf, matrix, lu_solve, cos, erf, erfc, exp, log, pi, sin, sqrt

mp.dps = 60
GRID = 1200


def f32(x):
    return mpf(struct.unpack("f", struct.pack("f", float(x)))[0])


def poly(coefficients, powers, x):
    return sum(c * x**p for c, p in zip(coefficients, powers))


def remez(target, weight, a, b, powers):
    """Coefficients of x**p, p in powers, with the least maximum of |weight (target - polynomial)| on [a, b]."""
    n = len(powers)
    nodes = [(a + b) / 2 + (b - a) / 2 * cos(pi * mpf(2 * (n + 1 - i) - 1) / (2 * (n + 1))) for i in range(n + 1)]
    grid = [(a + b) / 2 - (b - a) / 2 * cos(pi * mpf(i) / GRID) for i in range(GRID + 1)]
    values = [(x, target(x), weight(x)) for x in grid]
    for _ in range(12):
        system, right = matrix(n + 1, n + 1), matrix(n + 1, 1)
        for i, x in enumerate(nodes):
            for k, p in enumerate(powers):
                system[i, k] = x**p
            system[i, n] = (-1) ** i / weight(x)
            right[i] = target(x)
        c = list(lu_solve(system, right))[:n]
        error = [w * (t - poly(c, powers, x)) for x, t, w in values]
        peaks, current = [], 0
        for i in range(1, len(error)):
            if (error[i] > 0) != (error[current] > 0):
                peaks.append(current)
                current = i
            elif abs(error[i]) > abs(error[current]):
                current = i
        peaks.append(current)
        while len(peaks) > n + 1:
            peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
        if len(peaks) < n + 1:
            break
        nodes = [grid[i] for i in peaks]
        most = max(abs(e) for e in error)
        if (most - min(abs(error[i]) for i in peaks)) / most < 1e-4:
            break
    return c


def fit(name, target, weight, a, b, degree, refit=True):
    a, b, powers = mpf(a), mpf(b), list(range(degree + 1))
    c = remez(target, weight, a, b, powers)
    rounded = []
    for k in powers:
        if refit:
            c[k:] = remez(lambda x: target(x) - poly(rounded, powers, x), weight, a, b, powers[k:])
        rounded.append(f32(c[k]))
    points = [a + (b - a) * mpf(i) / 2000 for i in range(2001)]
    worst = max(abs(weight(x) * (target(x) - poly(rounded, powers, x))) for x in points)
    print(f"{name}: 2^{float(log(worst, 2)):.1f}")
    for k in powers:
        print(f"    x^{k}  {float(rounded[k]).hex()}")


def near(limit, at_zero, f):
    """f, or at_zero(x) where |x| < limit and f would divide by zero."""
    return lambda x: at_zero(x) if abs(x) < limit else f(x)


TINY = mpf(10) ** -30
half = log(mpf(2)) / 2 * mpf("1.0001")
quarter = (pi / 4) ** 2 * mpf("1.0002")

fit("exp(r) = 1 + r + r^2 P(r)", near(1e-15, lambda r: mpf(1) / 2 + r / 6, lambda r: (exp(r) - 1 - r) / r**2),
    lambda r: r**2 / exp(r) + TINY, -half, half, 4)
fit("log(1 + f) = f - f^2/2 + f^3 P(f)",
    near(1e-14, lambda f: mpf(1) / 3 - f / 4, lambda f: (log(1 + f) - f + f * f / 2) / f**3),
    near(1e-14, lambda f: mpf(10) ** -28, lambda f: abs(f**3 / log(1 + f))), -mpf(1) / 3, mpf(1) / 3, 7, refit=False)
fit("sin(r) = r + r^3 P(r^2)", near(1e-20, lambda z: -mpf(1) / 6, lambda z: (sin(sqrt(z)) / sqrt(z) - 1) / z),
    near(TINY, lambda z: TINY, lambda z: z * sqrt(z) / sin(sqrt(z))), 0, quarter, 3)
fit("cos(r) = 1 - r^2/2 + r^4 P(r^2)", near(1e-16, lambda z: mpf(1) / 24, lambda z: (cos(sqrt(z)) - 1 + z / 2) / z**2),
    near(TINY, lambda z: TINY, lambda z: z**2 / cos(sqrt(z))), 0, quarter, 2)
fit("erf(a) = a + a P(a^2)",
    near(1e-20, lambda z: 2 / sqrt(pi) - 1 - z * 2 / sqrt(pi) / 3, lambda z: erf(sqrt(z)) / sqrt(z) - 1),
    near(TINY, lambda z: sqrt(pi) / 2, lambda z: sqrt(z) / erf(sqrt(z))), 0, 1, 6)
fit("log erfc(a) = P(a)", lambda x: log(erfc(x)), lambda x: erfc(x) / erf(x), 1, "3.95", 6)

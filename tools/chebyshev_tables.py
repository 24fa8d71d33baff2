"""Writes torch_backplane/kernels/special/tables.py: Chebyshev coefficients of smooth parts of special functions.

Run it by hand (`pip install mpmath`; it takes a minute). mpmath computes the function values with 40 digits.
The other files in kernels/special compute the functions from these parts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mpmath import mp, mpf

mp.dps = 40
NODES = 96


def coefficients(function: Callable[[mpf], mpf]) -> list[mpf]:
    """Return the coefficients of function(t) for -1 <= t <= 1, as c[0] + c[1] T1(t) + …

    Trailing coefficients that do not matter in float64 (below 2^-57 of the largest one) are left out.
    """
    angles = [mp.pi * (k + mpf(1) / 2) / NODES for k in range(NODES)]
    values = [function(mp.cos(angle)) for angle in angles]
    found = [
        2 * mp.fsum(value * mp.cos(n * angle) for value, angle in zip(values, angles, strict=True)) / NODES
        for n in range(NODES)
    ]
    found[0] /= 2
    largest = max(map(abs, found))
    last = max(n for n, c in enumerate(found) if abs(c) > largest * mpf(2) ** -57)
    assert last < NODES - 10, "does not converge"
    return found[: last + 1]


def linear(low: float, high: float, function: Callable[[mpf], mpf]) -> Callable[[mpf], mpf]:
    """Map a function on [low, high] to -1 <= t <= 1."""
    return lambda t: function((mpf(low) + mpf(high)) / 2 + t * (mpf(high) - mpf(low)) / 2)


def even(high: float, function: Callable[[mpf], mpf]) -> Callable[[mpf], mpf]:
    """Map an even function on [0, high] to t = 2 (x / high)² - 1."""
    return lambda t: function(mpf(high) * mp.sqrt((t + 1) / 2))


def far(low: float, function: Callable[[mpf], mpf]) -> Callable[[mpf], mpf]:
    """Map a function on [low, infinity] to t = 2 low / x - 1."""
    return lambda t: function(2 * mpf(low) / (t + 1))


def far_even(low: float, function: Callable[[mpf], mpf]) -> Callable[[mpf], mpf]:
    """Map a function of 1 / x² on [low, infinity] to t = 2 (low / x)² - 1."""
    return lambda t: function(mpf(low) / mp.sqrt((t + 1) / 2))


def erfcx(x: mpf) -> mpf:
    return mp.exp(x * x) * mp.erfc(x)


def erfcinv(q: mpf) -> mpf:
    """Invert erfc with Newton's method on log(erfc(x)), which is nearly quadratic."""
    x = mp.sqrt(-mp.log(q)) if q < 0.1 else mpf(0.5)
    for _ in range(200):
        step = (mp.log(mp.erfc(x)) - mp.log(q)) * mp.erfc(x) * mp.sqrt(mp.pi) / 2 * mp.exp(x * x)
        x += step
        if abs(step) < abs(x) * mpf(10) ** -36:
            return x
    raise ArithmeticError("erfcinv")


def hankel(order: int, x: mpf) -> tuple[mpf, mpf]:
    """Return P and x Q of J = sqrt(2 / (pi x)) (P cos(c) - Q sin(c)), c = x - (2 order + 1) pi / 4, and Y likewise."""
    c = x - (2 * order + 1) * mp.pi / 4
    j, y, scale = mp.besselj(order, x), mp.bessely(order, x), mp.sqrt(mp.pi * x / 2)
    return scale * (j * mp.cos(c) + y * mp.sin(c)), scale * (y * mp.cos(c) - j * mp.sin(c)) * x


def airy_wave(zeta: mpf) -> tuple[mpf, mpf]:
    """Return F and zeta G of Ai(-x) = (sin(a) F - cos(a) G) / (sqrt(pi) x^(1/4)), a = zeta + pi / 4. zeta G is even."""
    x = (zeta * 3 / 2) ** (mpf(2) / 3)
    a, scale = zeta + mp.pi / 4, mp.sqrt(mp.pi) * x ** (mpf(1) / 4)
    ai, bi = mp.airyai(-x) * scale, mp.airybi(-x) * scale
    return mp.sin(a) * ai + mp.cos(a) * bi, (mp.sin(a) * bi - mp.cos(a) * ai) * zeta


def airy_decay(zeta: mpf) -> mpf:
    x = (zeta * 3 / 2) ** (mpf(2) / 3)
    return mp.airyai(x) * mp.exp(zeta) * x ** (mpf(1) / 4)


def k1_near(x: mpf) -> mpf:
    return (mp.besselk(1, x) - mp.log(x / 2) * mp.besseli(1, x)) * x


def y1_near(x: mpf) -> mpf:
    return (mp.bessely(1, x) - 2 / mp.pi * (mp.log(x) * mp.besselj(1, x) - 1 / x)) / x


def airy_zeta(x: float) -> mpf:
    return mpf(2) / 3 * mpf(x) ** mpf(1.5)


TABLES: dict[str, tuple[str, Callable[[mpf], mpf]]] = {
    "ERFCX": (
        "(1 + 2 x) erfcx(x) of x >= 0, in t = 1 - 7.5 / (x + 3.75)",
        lambda t: (lambda x: (1 + 2 * x) * erfcx(x))(mpf(7.5) / (1 - t) - mpf(3.75)),
    ),
    "ERFINV_NEAR": ("erfinv(y) / y of |y| <= 0.75, even", even(0.75, lambda y: mp.erfinv(y) / y)),
    "ERFCINV_TAIL": (
        "erfcinv(exp(-s²)) / s of 1.1 <= s <= 3",
        linear(1.1, 3, lambda s: erfcinv(mp.exp(-s * s)) / s),
    ),
    "ERFCINV_FAR_TAIL": (
        "erfcinv(exp(-s²)) / s of 3 <= s, in t = 2 * 3 / s - 1 (to s = 30)",
        linear(0.1, 1, lambda u: erfcinv(mp.exp(-((3 / u) ** 2))) / (3 / u)),
    ),
    "I0E_NEAR": ("exp(-x) I0(x) of 0 <= x <= 8", linear(0, 8, lambda x: mp.exp(-x) * mp.besseli(0, x))),
    "I0E_FAR": ("exp(-x) I0(x) sqrt(x) of x >= 8", far(8, lambda x: mp.exp(-x) * mp.besseli(0, x) * mp.sqrt(x))),
    "I1E_NEAR": ("exp(-x) I1(x) / x of 0 <= x <= 8", linear(0, 8, lambda x: mp.exp(-x) * mp.besseli(1, x) / x)),
    "I1E_FAR": ("exp(-x) I1(x) sqrt(x) of x >= 8", far(8, lambda x: mp.exp(-x) * mp.besseli(1, x) * mp.sqrt(x))),
    "K0_NEAR": (
        "K0(x) + log(x / 2) I0(x) of 0 <= x <= 2, even",
        even(2, lambda x: mp.besselk(0, x) + mp.log(x / 2) * mp.besseli(0, x)),
    ),
    "K0E_FAR": ("exp(x) K0(x) sqrt(x) of x >= 2", far(2, lambda x: mp.exp(x) * mp.besselk(0, x) * mp.sqrt(x))),
    "K1_NEAR": ("(K1(x) - log(x / 2) I1(x)) x of 0 <= x <= 2, even", even(2, k1_near)),
    "K1E_FAR": ("exp(x) K1(x) sqrt(x) of x >= 2", far(2, lambda x: mp.exp(x) * mp.besselk(1, x) * mp.sqrt(x))),
    "J0_NEAR": ("J0(x) of x <= 8, even", even(8, lambda x: mp.besselj(0, x))),
    "J1_NEAR": ("J1(x) / x of x <= 8, even", even(8, lambda x: mp.besselj(1, x) / x)),
    "Y0_NEAR": (
        "Y0(x) - 2 / pi log(x) J0(x) of x <= 8, even",
        even(8, lambda x: mp.bessely(0, x) - 2 / mp.pi * mp.log(x) * mp.besselj(0, x)),
    ),
    "Y1_NEAR": ("(Y1(x) - 2 / pi (log(x) J1(x) - 1 / x)) / x of x <= 8, even", even(8, y1_near)),
    "HANKEL0_P": ("P of order 0, x >= 8, in t = 2 (8 / x)² - 1", far_even(8, lambda x: hankel(0, x)[0])),
    "HANKEL0_Q": ("x Q of order 0", far_even(8, lambda x: hankel(0, x)[1])),
    "HANKEL1_P": ("P of order 1", far_even(8, lambda x: hankel(1, x)[0])),
    "HANKEL1_Q": ("x Q of order 1", far_even(8, lambda x: hankel(1, x)[1])),
    "AIRY_NEAR": ("Ai(x) of -4 <= x <= 2", linear(-4, 2, mp.airyai)),
    "AIRY_DECAY": (
        "Ai(x) exp(zeta) x^(1/4) of x >= 2, zeta = 2 / 3 x^(3/2), in t = 2 zeta(2) / zeta - 1",
        far(airy_zeta(2), airy_decay),
    ),
    "AIRY_WAVE_F": (
        "F of x <= -4, in t = 2 (zeta(4) / zeta)² - 1",
        far_even(airy_zeta(4), lambda zeta: airy_wave(zeta)[0]),
    ),
    "AIRY_WAVE_G": ("zeta G of x <= -4", far_even(airy_zeta(4), lambda zeta: airy_wave(zeta)[1])),
}


def main() -> None:
    lines = [
        '"""Chebyshev coefficients of parts of special functions; written by tools/chebyshev_tables.py."""',
        "",
    ]
    for name, (meaning, function) in TABLES.items():
        numbers = coefficients(function)
        print(name, len(numbers))
        lines += ["", f"# {meaning}", f"{name} = ("]
        lines += [f"    {float(number)!r}," for number in numbers]
        lines += [")"]
    target = Path(__file__).parent.parent / "torch_backplane" / "kernels" / "special" / "tables.py"
    target.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

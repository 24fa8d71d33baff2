"""The texts of functions.py: OpenCL C with FUNCTION (the qualifiers of a function) and POLYNOMIAL.

Most compute in float64 and round once. The result is then nearly always the nearest float32, and few steps and few
coefficients suffice. Coefficients without a source were fitted to the function at Chebyshev's points; comments give
the relative error.

The operands of ?: are computed beforehand, because compilers turn operands that are expressions into branches.
"""

from __future__ import annotations

# An odd polynomial on [-4, 4], beyond which erf is 1 or -1; relative error 4e-9. (With a ratio of two polynomials, LLVM
# pairs the two within an item if memory holds float16 or bfloat16, and then does not vectorize over items.)
_ERF = """
FUNCTION float cpu_erf(const float x) {
  const double c = x > 4.0f ? 4.0 : x < -4.0f ? -4.0 : (double)x, s = c * c;
  const double p = POLYNOMIAL(s, -1.0548464362586713e-19, 1.6461895742303097e-17, -1.1993082074153928e-15,
    5.4356112290351737e-14, -1.7253461499408076e-12, 4.100805217492259e-11, -7.636661364063587e-10,
    1.1537478453888524e-08, -1.4552772506912044e-07, 1.5683418988651658e-06, -1.4672344524186108e-05,
    0.00011994699833029545, -0.0008538059114803299, 0.005222814849914871, -0.026865362575235727, 0.11283761831412821,
    -0.3761263450602224, 1.1283791660116205);
  return (float)(p * c);
}
"""

# Moshier's Cephes (logf.c: method and coefficients): log(2^e m) with m in [sqrt(1/2), sqrt(2)).
_LOG = """
FUNCTION float cpu_log(const float x) {
  const bool tiny = x < 1.17549435e-38f;
  const int bits = as_int(tiny ? x * 8388608.0f : x);
  const float m = as_float((bits & 0x007fffff) | 0x3f800000);
  const bool high = m > 1.41421356f;
  const float e = (float)((bits >> 23) - 127 - (tiny ? 23 : 0) + (high ? 1 : 0));
  const float z = (high ? m * 0.5f : m) - 1.0f;
  const float s = z * z;
  const float p = POLYNOMIAL(z, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
    1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
  const float y = p * z * s - 2.12194440e-4f * e - 0.5f * s;
  const float result = z + y + 0.693359375f * e;
  return x == 0.0f ? -INFINITY : x < 0.0f ? NAN : x < INFINITY ? result : x;
}
"""

# Moshier's Cephes (expf.c: method and coefficients): 2^n e^r with |r| <= log(2) / 2. 2^n is split into two factors, for
# results below the smallest normal number. Adding and subtracting 1.5 * 2^23 rounds to an integer.
_EXP = """
FUNCTION float cpu_exp(const float x) {
  const float c = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  const float p = POLYNOMIAL(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
    1.6666665459e-1f, 5.0000001201e-1f);
  const float y = p * r * r + r + 1.0f;
  const int half_power = (int)n >> 1;
  const int rest = (int)n - half_power;
  const float result = y * as_float((half_power + 127) << 23) * as_float((rest + 127) << 23);
  return x == x ? result : x;
}
"""

# Rounds halves to even. Floats from 2^23 on are integers.
_RINT = """
FUNCTION float cpu_rint(const float x) {
  const float a = fabs(x);
  const float result = copysign((a + 8388608.0f) - 8388608.0f, x);
  return a < 8388608.0f ? result : x;
}
"""

_FLOOR = """
FUNCTION float cpu_floor(const float x) {
  const float n = cpu_rint(x), below = n - 1.0f;
  return n > x ? below : n;
}
"""

_CEIL = """
FUNCTION float cpu_ceil(const float x) {
  const float n = cpu_rint(x), above = n + 1.0f;
  return copysign(n < x ? above : n, x);
}
"""

_TRUNC = """
FUNCTION float cpu_trunc(const float x) { return copysign(cpu_floor(fabs(x)), x); }
"""

# Payne and Hanek's reduction for x >= 0: x 2/π modulo 4, by exact products with the pieces of 28 bits of 2/π that
# matter, from `first` on. The last piece has 53 bits; this suffices because no float32 is nearer than 2^-30 to a
# multiple of π/2. Adding 1.5 * 2^52 rounds to an integer, in the low bits of the sum. Below π/4, the rest is x itself.
_QUADRANT = """
FUNCTION double cpu_quadrant(const float x, uint* const quadrant) {
  const bool low = x < 0x1p53f, middle = x < 0x1p81f, high = x < 0x1p109f;
  const double first = low ? 0x1.45f306cp-1 : middle ? 0x1.c9c882ap-29 : high ? 0x1.4fe13a8p-59 : 0x1.f47d4dp-86;
  const double second = low ? 0x1.c9c882ap-29 : middle ? 0x1.4fe13a8p-59 : high ? 0x1.f47d4dp-86 : 0x1.bb81b6cp-113;
  const double third = low ? 0x1.4fe13a8p-59 : middle ? 0x1.f47d4dp-86 : high ? 0x1.bb81b6cp-113 : 0x1.4acc9ep-143;
  const double last = low ? 0x1.f47d4d377036ep-86 : middle ? 0x1.bb81b6c52b328p-113
    : high ? 0x1.4acc9e21c821p-143 : 0x1.0e4107f9458ebp-170;
  const double turns = first * x, a = turns - ((turns * 0.25 + 6755399441055744.0) - 6755399441055744.0) * 4.0;
  const double b = second * x, c = third * x, sum = a + b + c + 6755399441055744.0;
  const double rest = (((a - (sum - 6755399441055744.0)) + b) + c) + last * x;
  const bool small = x < 0.78539816f;
  *quadrant = small ? 0u : (uint)as_ulong(sum);
  const double itself = (double)x, r = rest * 1.5707963267948966;
  return small ? itself : r;
}
"""

# For |r| <= π/4; relative errors 3e-9 and 5e-11.
_SINE = """
FUNCTION double cpu_sine(const double r) {
  const double s = r * r;
  const double p = POLYNOMIAL(s, -0.00019503870774011274, 0.00833203552738444, -0.1666665066921616,
    0.9999999969164739);
  return p * r;
}
"""

_COSINE = """
FUNCTION double cpu_cosine(const double r) {
  const double s = r * r;
  return POLYNOMIAL(s, 2.4379789395383755e-05, -0.001388661754772064, 0.04166661667759459, -0.49999999614703977,
    0.9999999999524657);
}
"""

_SIN = """
FUNCTION float cpu_sin(const float x) {
  uint quadrant;
  const double r = cpu_quadrant(fabs(x), &quadrant);
  const uint sign = (as_uint(x) & 0x80000000u) ^ (quadrant & 2u) << 30;
  const double sine = cpu_sine(r), cosine = cpu_cosine(r);
  const float size = (float)((quadrant & 1u) != 0 ? cosine : sine), result = as_float(as_uint(size) ^ sign);
  return fabs(x) < INFINITY ? result : NAN;
}
"""

_COS = """
FUNCTION float cpu_cos(const float x) {
  uint quadrant;
  const double r = cpu_quadrant(fabs(x), &quadrant);
  const uint sign = ((quadrant + 1u) & 2u) << 30;
  const double sine = cpu_sine(r), cosine = cpu_cosine(r);
  const float size = (float)((quadrant & 1u) == 0 ? cosine : sine), result = as_float(as_uint(size) ^ sign);
  return fabs(x) < INFINITY ? result : NAN;
}
"""

_TAN = """
FUNCTION float cpu_tan(const float x) {
  uint quadrant;
  const double r = cpu_quadrant(fabs(x), &quadrant), p = cpu_sine(r), q = cpu_cosine(r);
  const bool odd = (quadrant & 1u) != 0;
  const double other = -q, above = odd ? other : p, below = odd ? p : q;
  const float size = (float)(above / below), result = as_float(as_uint(size) ^ (as_uint(x) & 0x80000000u));
  return fabs(x) < INFINITY ? result : NAN;
}
"""

# For |x| < 1000, 2^x is `power` + `power` times the returned value, whose relative error is 2e-10. Adding 1.5 * 2^52
# rounds to an integer, in the low bits of the sum.
_EXP2_PARTS = """
FUNCTION double cpu_exp2_parts(const double x, double* const power) {
  const double sum = x + 6755399441055744.0, r = x - (sum - 6755399441055744.0);
  const double p = POLYNOMIAL(r, 1.5297323760701075e-05, 0.0001546144469856913, 0.001333350238616277,
    0.009618056678524637, 0.055504108839096185, 0.24022650922288757, 0.6931471805599453);
  *power = as_double((as_ulong(sum) << 52) + 0x3ff0000000000000ul);
  return p * r;
}
"""

_EXP2_DOUBLE = """
FUNCTION double cpu_exp2_double(const double x) {
  double power;
  const double fraction = cpu_exp2_parts(x, &power);
  return fraction * power + power;
}
"""

_EXP2_LESS_ONE = """
FUNCTION double cpu_exp2_less_one(const double x) {
  double power;
  const double fraction = cpu_exp2_parts(x, &power);
  return fraction * power + (power - 1.0);
}
"""

_EXP2 = """
FUNCTION float cpu_exp2(const float x) {
  const float c = x > 130.0f ? 130.0f : x < -160.0f ? -160.0f : x;
  return (float)cpu_exp2_double((double)c);
}
"""

_EXPM1 = """
FUNCTION float cpu_expm1(const float x) {
  const float c = x > 90.0f ? 90.0f : x < -90.0f ? -90.0f : x;
  return copysign((float)cpu_exp2_less_one(c * 1.4426950408889634), x);
}
"""

_SINH = """
FUNCTION float cpu_sinh(const float x) {
  const float a = fabs(x), c = a > 100.0f ? 100.0f : a;
  const double y = cpu_exp2_less_one(c * 1.4426950408889634);
  return copysign((float)(0.5 * (y + y / (y + 1.0))), x);
}
"""

_COSH = """
FUNCTION float cpu_cosh(const float x) {
  const float a = fabs(x), c = a > 100.0f ? 100.0f : a;
  const double y = cpu_exp2_double(c * 1.4426950408889634);
  return (float)(0.5 * (y + 1.0 / y));
}
"""

_TANH = """
FUNCTION float cpu_tanh(const float x) {
  const float a = fabs(x), c = a > 20.0f ? 20.0f : a;
  const double y = cpu_exp2_less_one(c * 2.8853900817779268);
  return copysign((float)(y / (y + 2.0)), x);
}
"""

# log(x) for positive finite x: 2 atanh((m - 1) / (m + 1)) + e log(2), where x = 2^e m with m in [sqrt(1/2), sqrt(2));
# relative error 5e-12.
_LOG_DOUBLE = """
FUNCTION double cpu_log_double(const double x) {
  const ulong bits = as_ulong(x) + (0x3ff0000000000000ul - 0x3fe6a09e667f3bcdul);
  const double m = as_double((bits & 0xffffffffffffful) + 0x3fe6a09e667f3bcdul);
  const double e = as_double(bits >> 52 | 0x4330000000000000ul) - 4503599627371519.0;
  const double r = (m - 1.0) / (m + 1.0), s = r * r;
  const double p = POLYNOMIAL(s, 0.23616359099145984, 0.2853505103781631, 0.4000038467237519, 0.6666666524748752,
    2.0000000000083595);
  return p * r + e * 0.6931471805599453;
}
"""

# `result` if x is positive and finite; otherwise the special value of log(x).
_LOG_ENDS = """
FUNCTION float cpu_log_ends(const float x, const float result) {
  return x == 0.0f ? -INFINITY : x < 0.0f ? NAN : x < INFINITY ? result : x;
}
"""

_LOG2 = """
FUNCTION float cpu_log2(const float x) {
  return cpu_log_ends(x, (float)(cpu_log_double((double)x) * 1.4426950408889634));
}
"""

_LOG10 = """
FUNCTION float cpu_log10(const float x) {
  return cpu_log_ends(x, (float)(cpu_log_double((double)x) * 0.4342944819032518));
}
"""

# For |x| < 2^-12, 1 + x can lose bits of x.
_LOG1P = """
FUNCTION float cpu_log1p(const float x) {
  const double d = (double)x, near = d - d * d * (0.5 - d * 0.3333333333333333);
  const double far = cpu_log_double(1.0 + d);
  const float result = (float)(fabs(x) < 0x1p-12f ? near : far), inside = x != 0.0f && x < INFINITY ? result : x;
  const float outside = x == -1.0f ? -INFINITY : NAN;
  return x > -1.0f ? inside : outside;
}
"""

_ASINH = """
FUNCTION float cpu_asinh(const float x) {
  const double d = (double)fabs(x), near = d - d * d * d * 0.16666666666666666;
  const double far = cpu_log_double(d + sqrt(d * d + 1.0));
  const float result = (float)(d < 0x1p-11 ? near : far);
  return copysign(fabs(x) < INFINITY ? result : x, x);
}
"""

_ACOSH = """
FUNCTION float cpu_acosh(const float x) {
  const double d = (double)x;
  const float result = (float)cpu_log_double(d + sqrt(d * d - 1.0));
  return x < 1.0f ? NAN : x < INFINITY ? result : x;
}
"""

_ATANH = """
FUNCTION float cpu_atanh(const float x) {
  const float a = fabs(x);
  const double d = (double)a, near = d + d * d * d * 0.3333333333333333;
  const double far = 0.5 * cpu_log_double((1.0 + d) / (1.0 - d));
  const float result = (float)(d < 0x1p-11 ? near : far), outside = a == 1.0f ? INFINITY : NAN;
  return copysign(a < 1.0f ? result : outside, x);
}
"""

# The angle of (x, y), both non-negative, from 0 to π/2; relative error 7e-11.
_ANGLE = """
FUNCTION double cpu_angle(const double y, const double x) {
  const bool steep = y > x;
  const double less = steep ? x : y, greater = steep ? y : x, ratio = less / greater;
  const double equal = y == 0.0 ? 0.0 : 1.0, q = y == x ? equal : ratio, s = q * q;
  const double p = POLYNOMIAL(s, -0.0006633954571104787, 0.00473248419342192, -0.015828322749149415,
    0.033826218952786875, -0.05395668057137172, 0.07228278345377252, -0.08974171958363882, 0.11091922963683302,
    -0.14283813255743194, 0.19999901102171555, -0.3333333129088999, 0.9999999999293037) * q;
  const double rest = 1.5707963267948966 - p;
  return steep ? rest : p;
}
"""

_ATAN = """
FUNCTION float cpu_atan(const float x) { return copysign((float)cpu_angle((double)fabs(x), 1.0), x); }
"""

_ATAN2 = """
FUNCTION float cpu_atan2(const float y, const float x) {
  const double angle = cpu_angle((double)fabs(y), (double)fabs(x)), rest = 3.141592653589793 - angle;
  return copysign((float)(as_int(x) < 0 ? rest : angle), y);
}
"""

_ASIN = """
FUNCTION float cpu_asin(const float x) {
  const double d = (double)fabs(x);
  return copysign((float)cpu_angle(d, sqrt((1.0 - d) * (1.0 + d))), x);
}
"""

_ACOS = """
FUNCTION float cpu_acos(const float x) {
  const double d = (double)fabs(x), angle = cpu_angle(sqrt((1.0 - d) * (1.0 + d)), d), rest = 3.141592653589793 - angle;
  return (float)(x < 0.0f ? rest : angle);
}
"""

# In float64, the squares neither overflow nor underflow.
_HYPOT = """
FUNCTION float cpu_hypot(const float x, const float y) {
  const float result = (float)sqrt((double)x * x + (double)y * y);
  return fabs(x) == INFINITY || fabs(y) == INFINITY ? INFINITY : result;
}
"""

# C99's special values: F.9.4.4.
_POW = """
FUNCTION float cpu_pow(const float x, const float y) {
  const float a = fabs(x), half_y = y * 0.5f;
  const double log_a = cpu_log_double((double)a);
  const double itself = (double)a, finite = log_a * 1.4426950408889634;
  const double log2_a = a == 0.0f ? -INFINITY : a < INFINITY ? finite : itself;
  const double e = y * log2_a;
  const float size = (float)cpu_exp2_double(e > 130.0 ? 130.0 : e < -160.0 ? -160.0 : e);
  const bool integer = cpu_rint(y) == y, odd = integer && cpu_rint(half_y) != half_y;
  const uint sign = as_uint(x) & 0x80000000u;
  const float signed_size = as_float(as_uint(size) ^ (odd ? sign : 0u));
  const float result = x < 0.0f && a < INFINITY && !integer ? NAN : signed_size;
  return y == 0.0f || x == 1.0f || (a == 1.0f && fabs(y) == INFINITY) ? 1.0f : result;
}
"""

# (1 + 2a) exp(a²) erfc(a) as a polynomial of (a - 3) / (a + 3), after Shepherd and Laframboise (Chebyshev
# approximation of (1 + 2x) exp(x²) erfc x, 1981), up to a = 10.2, beyond which erfc is zero; relative error 8e-10.
_ERFC = """
FUNCTION float cpu_erfc(const float x) {
  const double c = (double)fabs(x), a = c > 10.2 ? 10.2 : c, t = (a - 3.0) / (a + 3.0);
  const double p = POLYNOMIAL(t, 3.698943628240467e-05, -0.00017877597185293593, -0.0007398132267707949,
    0.001947854952370501, 0.0025279479024525693, -0.023787288137893638, 0.0683064417936708, -0.11927164483815812,
    0.12964536701032092, -0.04756238429148228, -0.13562111146880587, 1.2530080589497452);
  const double tail = p / (2.0 * a + 1.0) * cpu_exp2_double(a * a * -1.4426950408889634);
  const double rest = 2.0 - tail;
  return (float)(x < 0.0f ? rest : tail);
}
"""

# |x| modulo |y| 2^252, modulo |y| 2^224 and so on down to |y|. Each quotient is at most 2^28, so its product with |y|
# is exact, and so is the rest. Adding 1.5 * 2^52 rounds the quotient to an integer; |y| is added to a negative rest.
_FMOD = (
    """
FUNCTION float cpu_fmod(const float x, const float y) {
  const double size = (double)fabs(y), inverse = 1.0 / size;
  double rest = (double)fabs(x), quotient;
"""
    + "".join(
        f"""\
  quotient = (rest * (inverse * 0x1p-{shift}) + 6755399441055744.0) - 6755399441055744.0;
  rest -= quotient * (size * 0x1p{shift});
"""
        for shift in range(252, -1, -28)
    )
    + """\
  const double above = rest + size;
  const float result = copysign((float)(rest < 0.0 ? above : rest), x);
  return fabs(x) < INFINITY && fabs(y) == INFINITY ? x : result;
}
"""
)

# Each function is defined before its first use.
TEXTS = (
    *(_ERF, _LOG, _EXP),
    *(_RINT, _FLOOR, _CEIL, _TRUNC),
    *(_QUADRANT, _SINE, _COSINE, _SIN, _COS, _TAN),
    *(_EXP2_PARTS, _EXP2_DOUBLE, _EXP2_LESS_ONE, _EXP2, _EXPM1, _SINH, _COSH, _TANH, _ERFC),
    *(_LOG_DOUBLE, _LOG_ENDS, _LOG2, _LOG10, _LOG1P, _ASINH, _ACOSH, _ATANH, _POW),
    *(_ANGLE, _ATAN, _ATAN2, _ASIN, _ACOS, _HYPOT, _FMOD),
)

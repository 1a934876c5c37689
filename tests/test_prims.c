/* Tests of the scalar primitives: errors in ulp against the double functions of libm, exact rules, the random
 * numbers, and the comparison of targets that the other test_prims files call. */
#define WKT_TIER "baseline"
#include "prims_vector.inc"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WKT_TABLE wkt_prim_scalar
#define WKT_TITLE "scalar C"
#define WKT_LINKAGE
#define WKT_CALL(n) wks_##n
#define WKT_VF float
#define WKT_VI int32_t
#define WKT_WIDTH 1
#include "prims_table.inc"

typedef struct prim_info {
    const char *name, *signature;
    int arity;
} prim_info;
static const prim_info prims[WKT_PRIMS] = {
#define P(E, n, arity, signature) {#n, signature, arity},
#include "ops/prims.def"
};

static float float_of(uint32_t bits) { return wks_float_of((int32_t)bits); }
static uint32_t bits_of(float x) { return (uint32_t)wks_bits_of(x); }

static const uint32_t special_bits[] = {
    0x00000000, 0x80000000,                         /* zeros */
    0x00000001, 0x80000001, 0x007fffff, 0x807fffff, /* denormals */
    0x00800000, 0x80800000, 0x00800001,             /* the smallest normal numbers */
    0x3f800000, 0xbf800000, 0x3f7fffff, 0x3f800001, 0x3f000000, 0xbf000000, 0x40000000, /* about 1 */
    0x3f2aaaaa, 0x3f2aaaab, 0x3f2aaaac, 0x3faaaaaa, 0x3faaaaab, 0x3faaaaac, /* 2/3 and 4/3: log's ranges */
    0x42b17217, 0x42b17218, 0x42b20000, 0xc2cff1b4, 0xc2cff1b5, 0xc2d00000, 0xc2aeac50, /* exp's edges */
    0x41100000, 0x41200000, 0x407fffff, 0x40800000, /* where tanh and erf become 1 */
    0x40490fdb, 0xc0490fdb, 0x3fc90fdb, 0x40c90fdb, 0x46000000, 0x46000001, 0xc6000001, /* sin's */
    0x4affffff, 0x4b000000, 0x4b000001, 0xcb000001, 0x4b7fffff, 0x4b800000,             /* about 2^23 */
    0x4effffff, 0x4f000000, 0xcf000000, 0xcf000001,                                     /* about 2^31 */
    0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, /* the largest, and infinity */
    0x7fc00000, 0xffc00000, 0x7fffffff, 0x7f800001, /* NaNs */
};
enum { SPECIALS = sizeof special_bits / sizeof special_bits[0] };

/* --- targets against each other --- */

static uint32_t random_lane(char type) {
    uint64_t r = wkt_u64();
    uint32_t bits = (uint32_t)(r >> 32);
    switch (r % 4) {
    case 0:
        return special_bits[bits % SPECIALS];
    case 1:
        return bits;
    case 2:
        return type == 'I' ? bits % 7 - 3 : bits_of((float)((double)bits * 0x1p-32 * 40 - 20));
    default:
        return type == 'I' ? bits >> 16 : bits_of((float)((double)bits * 0x1p-32 * 4 - 2));
    }
}

/* Signed NaNs and all, these only move bits. */
static bool moves_bits(int prim) {
    return prim == WKT_P_NEG || prim == WKT_P_ABS || prim == WKT_P_SEL || prim == WKT_P_ISEL;
}

static void compare_one(const wkt_prim_table *got, int prim, void *const *in, uint32_t *want, uint32_t *out,
                        size_t n) {
    const prim_info *info = &prims[prim];
    bool select = prim == WKT_P_SEL || prim == WKT_P_ISEL;
    for (int k = 0; k < info->arity; k++)
        for (size_t i = 0; i < n; i++)
            ((uint32_t *)in[k])[i] =
                select && k == 0 ? -(uint32_t)(wkt_u64() >> 63) : random_lane(info->signature[2 + k]);
    const void *operands[3] = {in[0], in[1], in[2]};
    wkt_prim_scalar.run[prim](want, operands, n);
    got->run[prim](out, operands, n);
    for (size_t i = 0; i < n; i++) {
        if (out[i] == want[i])
            continue;
        bool nan = info->signature[0] == 'F' && isnan(float_of(out[i])) && isnan(float_of(want[i]));
        if (nan && !moves_bits(prim))
            continue;
        FAIL("%s of %s: lane %zu: operands %08x %08x %08x give %08x, scalar C %08x", info->name, got->name, i,
             ((uint32_t *)in[0])[i], ((uint32_t *)in[1])[i], ((uint32_t *)in[2])[i], out[i], want[i]);
        return;
    }
}

static void compare_random(const wkt_prim_table *got, int prim, float *want, float *out, size_t n) {
    for (int turn = 0; turn < 4; turn++) {
        uint64_t seed = wkt_u64(), seq = turn < 2 ? wkt_below(100) : wkt_u64();
        /* The second and the last have a carry into the high word of the block number inside. */
        uint64_t base =
            turn % 2 ? ((wkt_below(1000) + 1) << 34) - 4 * (wkt_below(n / 4) + 1) : 4 * wkt_below(1000);
        wkt_prim_scalar.rng[prim](want, seed, seq, base, n);
        got->rng[prim](out, seed, seq, base, n);
        if (!CHECK_MEM(out, want, n * sizeof *out))
            FAIL("%s of %s, seed %llu, sequence %llu, base %llu", prims[prim].name, got->name,
                 (unsigned long long)seed, (unsigned long long)seq, (unsigned long long)base);
    }
}

/* A root that is made of an estimate: every significand, both parities of the exponent, at a random exponent. */
static void compare_roots(const wkt_prim_table *got, void *const *in, uint32_t *want, uint32_t *out,
                          size_t n) {
    uint32_t binade = (uint32_t)wkt_below(254) + 1, step = wkt_quick() ? 37 : 1;
    for (uint32_t at = 0; at < 2u << 23;) {
        for (size_t i = 0; i < n; i++, at += step)
            ((uint32_t *)in[0])[i] = ((binade << 23) + at) & 0x7fffffff;
        const void *operands[1] = {in[0]};
        wkt_prim_scalar.run[WKT_P_SQRT](want, operands, n);
        got->run[WKT_P_SQRT](out, operands, n);
        for (size_t i = 0; i < n; i++)
            if (out[i] != want[i] && !(isnan(float_of(out[i])) && isnan(float_of(want[i])))) {
                FAIL("sqrt of %s: %08x gives %08x, scalar C %08x", got->name, ((uint32_t *)in[0])[i], out[i],
                     want[i]);
                return;
            }
    }
}

void wkt_prims_compare(const wkt_prim_table *got) {
    size_t n = wkt_quick() ? 1 << 12 : 1 << 16;
    void *buffer[5] = {0};
    for (int i = 0; i < 5; i++) {
        buffer[i] = aligned_alloc(64, n * 4);
        if (!buffer[i]) {
            FAIL("out of memory");
            goto out;
        }
        memset(buffer[i], 0, n * 4);
    }
    for (int prim = 0; prim < WKT_PRIMS; prim++) {
        if (got->run[prim])
            compare_one(got, prim, buffer, buffer[3], buffer[4], n);
        else
            compare_random(got, prim, buffer[3], buffer[4], n < 4096 ? n : 4096);
    }
    compare_roots(got, buffer, buffer[3], buffer[4], n);
out:
    for (int i = 0; i < 5; i++)
        free(buffer[i]);
}

TEST(prims, baseline_vectors_equal_scalar) { compare_tier(); }

/* --- errors --- */

/* |got - want| in units of the last place of a float near want, denormals having their own. Past the largest
 * float the exact value decides: from 2^128 - 2^103 on it rounds to infinity. */
static double ulps(float got, double want) {
    if (isnan(want) || isnan(got))
        return isnan(want) && isnan(got) ? 0 : INFINITY;
    if (isinf(got))
        return fabs(want) >= 0x1.ffffffp127 && (got > 0) == (want > 0) ? 0 : INFINITY;
    if (isinf(want))
        return INFINITY;
    int exponent;
    frexp(want, &exponent);
    if (exponent < -125)
        exponent = -125;
    return fabs((double)got - want) / ldexp(1.0, exponent - 24);
}

typedef struct sweep {
    float (*got)(float);
    double (*want)(double);
    double bound, worst;
    float at;
} sweep;

static void sweep_point(sweep *s, float x) {
    double e = ulps(s->got(x), s->want((double)x));
    if (e > s->worst) {
        s->worst = e;
        s->at = x;
    }
}

/* All specials, bit patterns over the whole range, and points spread evenly over [-range, range]. */
static void sweep_all(sweep *s, const char *name, double range) {
    uint32_t points = wkt_quick() ? 100000 : 1000000, stride = (uint32_t)(0x1p32 / points) | 1;
    for (int i = 0; i < SPECIALS; i++)
        sweep_point(s, float_of(special_bits[i]));
    uint32_t bits = (uint32_t)wkt_u64();
    for (uint32_t i = 0; i < points; i++)
        sweep_point(s, float_of(bits += stride));
    for (uint32_t i = 0; i < points; i++)
        sweep_point(s, (float)wkt_uniform(-range, range));
    if (!CHECK(s->worst <= s->bound))
        FAIL("%s(%.9g) = %.9g is %.3f ulp off, more than %.2f", name, (double)s->at, (double)s->got(s->at),
             s->worst, s->bound);
}

#define SCALAR_FN(n)                                                                                         \
    static float scalar_##n(float x) { return wks_##n(x); }
SCALAR_FN(exp)
SCALAR_FN(log)
SCALAR_FN(tanh)
SCALAR_FN(erf)
SCALAR_FN(sin)
SCALAR_FN(cos)
SCALAR_FN(floor)
SCALAR_FN(sqrt)

/* The bounds are the maxima, rounded up, over every float of exp [-105, 89], log [2^-10, 2^10], tanh [2^-13,
 * 10], erf [2^-13, 4.2], sin and cos [2^-13, 2^13], and over every 7th to 17th of the others. */
#define ERROR_TEST(n, bound_, range)                                                                         \
    TEST(prims, error_of_##n) {                                                                              \
        sweep s = {.got = scalar_##n, .want = n, .bound = bound_};                                           \
        sweep_all(&s, #n, range);                                                                            \
    }
ERROR_TEST(exp, 1.0, 104)
ERROR_TEST(log, 0.9, 4)
ERROR_TEST(tanh, 2.7, 10)
ERROR_TEST(erf, 1.4, 4)
ERROR_TEST(sin, 1.6, 30)
ERROR_TEST(cos, 1.6, 30)
ERROR_TEST(floor, 0, 1000)
ERROR_TEST(sqrt, 0.5, 1000)

static bool same(float got, uint32_t want) { return bits_of(got) == want; }

TEST(prims, signs_and_limits) {
    CHECK(same(wks_exp(-INFINITY), 0) && wks_exp(INFINITY) == INFINITY && wks_exp(0.0f) == 1.0f);
    CHECK(same(wks_exp(-103.2789f), 1)); /* the smallest denormal */
    CHECK(wks_log(0.0f) == -INFINITY && wks_log(-0.0f) == -INFINITY && same(wks_log(1.0f), 0));
    CHECK(isnan(wks_log(-1.0f)) && isnan(wks_log(-INFINITY)) && isnan(wks_log(-1e-45f)));
    CHECK(wks_tanh(INFINITY) == 1.0f && wks_tanh(-INFINITY) == -1.0f && same(wks_tanh(-0.0f), 0x80000000));
    CHECK(wks_erf(INFINITY) == 1.0f && wks_erf(-INFINITY) == -1.0f && same(wks_erf(-0.0f), 0x80000000));
    CHECK(same(wks_sin(-0.0f), 0x80000000) && wks_cos(-0.0f) == 1.0f);
    CHECK(isnan(wks_sin(INFINITY)) && isnan(wks_cos(-INFINITY)));
    CHECK(same(wks_floor(-0.0f), 0x80000000) && same(wks_floor(0.5f), 0) && wks_floor(-0.5f) == -1.0f);
    CHECK(wks_floor(-INFINITY) == -INFINITY && isnan(wks_floor(NAN)));
    for (uint32_t bits = 0; bits < 100; bits++) {
        CHECK(same(wks_tanh(float_of(bits)), bits));
        CHECK(same(wks_sin(float_of(bits)), bits));
    }
}

TEST(prims, comparisons_and_extremes) {
    CHECK(wks_lt(1, 2) == -1 && wks_lt(2, 1) == 0 && wks_lt(1, 1) == 0 && wks_lt(NAN, 1) == 0);
    CHECK(wks_le(1, 1) == -1 && wks_le(1, NAN) == 0 && wks_eq(NAN, NAN) == 0 && wks_eq(0.0f, -0.0f) == -1);
    CHECK(wks_ilt(INT32_MIN, INT32_MAX) == -1 && wks_ieq(3, 3) == -1 && wks_ieq(3, 4) == 0);
    CHECK(wks_and(-1, 0) == 0 && wks_or(-1, 0) == -1 && wks_not(-1) == 0 && wks_not(0) == -1);
    CHECK(wks_min(1, 2) == 1 && wks_max(1, 2) == 2 && wks_min(2, 1) == 1 && wks_max(2, 1) == 2);
    CHECK(isnan(wks_min(NAN, 1)) && isnan(wks_min(1, NAN)) && isnan(wks_max(NAN, 1)) &&
          isnan(wks_max(1, NAN)));
    CHECK(same(wks_max(0.0f, -0.0f), 0x80000000) && same(wks_max(-0.0f, 0.0f), 0));
    CHECK(same(wks_min(0.0f, -0.0f), 0x80000000) && same(wks_min(-0.0f, 0.0f), 0));
    CHECK(wks_sel(-1, 1, 2) == 1 && wks_sel(0, 1, 2) == 2 && wks_isel(-1, 1, 2) == 1 &&
          wks_isel(0, 1, 2) == 2);
}

TEST(prims, integers) {
    CHECK(wks_iadd(INT32_MAX, 1) == INT32_MIN && wks_isub(INT32_MIN, 1) == INT32_MAX);
    CHECK(wks_imul(0x10000, 0x10000) == 0 && wks_imul(-3, 5) == -15 && wks_imul(INT32_MIN, -1) == INT32_MIN);
    CHECK(wks_f2i(1.9f) == 1 && wks_f2i(-1.9f) == -1 && wks_f2i(-0.5f) == 0 && wks_f2i(NAN) == 0);
    CHECK(wks_f2i(2147483520.0f) == 2147483520 && wks_f2i(2147483648.0f) == INT32_MAX);
    CHECK(wks_f2i(-2147483648.0f) == INT32_MIN && wks_f2i(-1e20f) == INT32_MIN);
    CHECK(wks_f2i(INFINITY) == INT32_MAX && wks_f2i(-INFINITY) == INT32_MIN);
    CHECK(wks_i2f(16777217) == 16777216.0f && wks_i2f(16777219) == 16777220.0f &&
          wks_i2f(INT32_MIN) == -0x1p31f);
}

/* Where a product in double and a sum rounded twice goes wrong: the sum lies within a double's rounding of a
 * tie between floats. The vector form has to agree with libm's fmaf, which rounds once. */
TEST(prims, fma_rounds_once) {
    wki_vf a = {0}, b = {0}, c = {0};
    for (int turn = 0; turn < (wkt_quick() ? 2000 : 50000); turn++) {
        for (int i = 0; i < 16; i++) {
            /* a * b takes up to 48 bits, c lies 2^9 below to 2^51 above it, or cancels its top, or all of it
             * is denormal. */
            a[i] = float_of(0x3f800000 | (uint32_t)wkt_below(1 << 23));
            b[i] = i % 2 ? float_of(0x3f800000 | (uint32_t)wkt_below(1 << 23))
                         : 1.0f + (float)ldexp(1, -(int)wkt_below(24));
            c[i] = (float)ldexp(1 + wkt_uniform(0, 1), (int)wkt_below(60) - 8) * (wkt_below(2) ? 1 : -1);
            if (i % 4 == 3)
                c[i] = (float)(-(double)a[i] * b[i]);
            if (i % 4 == 2)
                a[i] *= 0x1p-100f, b[i] *= 0x1p-40f, c[i] *= 0x1p-130f;
        }
        wki_vf r = wkv_fma(a, b, c);
        for (int i = 0; i < 16; i++)
            if (!same(r[i], bits_of(fmaf(a[i], b[i], c[i])))) {
                FAIL("fma(%a, %a, %a) = %a, not %a", (double)a[i], (double)b[i], (double)c[i], (double)r[i],
                     (double)fmaf(a[i], b[i], c[i]));
                return;
            }
    }
    float tie_a = 1.0f + 0x1p-12f, tie_c = 0x1p-60f;
    a[0] = tie_a, b[0] = tie_a, c[0] = tie_c; /* 1 + 2^-11 + 2^-24 is a tie that only c breaks */
    CHECK(wkv_fma(a, b, c)[0] == 1.0f + 0x1p-11f + 0x1p-23f);
    c[0] = -tie_c;
    CHECK(wkv_fma(a, b, c)[0] == 1.0f + 0x1p-11f);
}

/* --- random numbers --- */

/* The known answers that Random123 publishes for philox4x32-10. */
TEST(prims, philox_known_answers) {
    static const struct {
        uint64_t seed, seq, block;
        uint32_t want[4];
    } known[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822,
         0x0370734413198a2e,
         0x85a308d3243f6a88,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        uint32_t got[4];
        wks_philox(known[i].seed, known[i].seq, known[i].block, got);
        CHECK_MEM(got, known[i].want, sizeof got);
        wki_ni lanes = wkn_philox(known[i].seed, known[i].seq, known[i].block);
        for (int k = 0; k < 4; k++)
            CHECK_EQ_I((uint32_t)lanes[k], known[i].want[k]);
    }
}

TEST(prims, random_elements_stand_alone) {
    uint64_t seed = wkt_u64(), seq = wkt_u64(), base = 4 * wkt_below(1ull << 40);
    wki_vf u = wkv_uniform(seed, seq, base), z = wkv_normal(seed, seq, base);
    for (unsigned i = 0; i < 16; i++) {
        CHECK(u[i] == wks_uniform(seed, seq, base + i));
        CHECK(z[i] == wks_normal(seed, seq, base + i));
    }
    CHECK(wks_uniform(seed, seq, base) != wks_uniform(seed, seq + 1, base));
    CHECK(wks_uniform(seed, seq, base) != wks_uniform(seed + 1, seq, base));
    CHECK(same(wks_uniform_bits(-1), bits_of(1 - 0x1p-24f)) && same(wks_uniform_bits(255), 0));
    /* The ends of the radius: the largest normal number is finite, the smallest zero. */
    CHECK_NEAR(wks_normal_bits(0, 0, 1), sqrt(64 * log(2)), 1e-5);
    CHECK(wks_normal_bits(-1, 0, 1) == 0.0f);
}

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double normal_cdf(double x) { return erfc(-x * sqrt(0.5)) / 2; }
static double uniform_cdf(double x) { return x; }

/* Kolmogorov and Smirnov's distance times sqrt(n): above 2.6 once in 400,000 samples. */
static double ks(float *x, size_t n, double (*cdf)(double)) {
    qsort(x, n, sizeof *x, ascending);
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double f = cdf((double)x[i]);
        worst = fmax(worst, fmax((double)(i + 1) / (double)n - f, f - (double)i / (double)n));
    }
    return worst * sqrt((double)n);
}

/* Five standard deviations of the mean of x^k and of the products of neighbours. */
static void check_distribution(float *x, size_t n, bool normal) {
    double m1 = 0, m2 = 0, m3 = 0, m4 = 0, next = 0, pair = 0, root = sqrt((double)n);
    double mean = normal ? 0 : 0.5, scale = normal ? 1 : sqrt(12);
    for (size_t i = 0; i < n; i++) {
        double z = (x[i] - mean) * scale;
        m1 += z, m2 += z * z, m3 += z * z * z, m4 += z * z * z * z;
        if (i + 2 < n) {
            next += z * (x[i + 1] - mean) * scale;
            pair += z * (x[i + 2] - mean) * scale;
        }
    }
    /* Moments of z: 1, kurtosis, x^6 and x^8 of the standard normal, or of the uniform with variance 1. */
    double k4 = normal ? 3 : 1.8, k6 = normal ? 15 : 27.0 / 7, k8 = normal ? 105 : 9;
    double count = (double)n;
    CHECK_NEAR(m1 / count, 0, 5 / root);
    CHECK_NEAR(m2 / count, 1, 5 * sqrt(k4 - 1) / root);
    CHECK_NEAR(m3 / count, 0, 5 * sqrt(k6) / root);
    CHECK_NEAR(m4 / count, k4, 5 * sqrt(k8 - k4 * k4) / root);
    CHECK_NEAR(next / count, 0, 5 / root);
    CHECK_NEAR(pair / count, 0, 5 / root);
    CHECK(ks(x, n, normal ? normal_cdf : uniform_cdf) < 2.6);
}

TEST(prims, uniform_distribution) {
    size_t n = wkt_quick() ? 1 << 15 : 1 << 20;
    float *x = malloc(n * sizeof *x);
    REQUIRE(x != NULL);
    uint64_t seed = wkt_u64(), seq = wkt_below(1000);
    bool inside = true, dyadic = true;
    for (size_t i = 0; i < n; i++) {
        x[i] = wks_uniform(seed, seq, i);
        inside &= x[i] >= 0 && x[i] < 1;
        dyadic &= x[i] * 0x1p24f == wks_floor(x[i] * 0x1p24f);
    }
    CHECK(inside);
    CHECK(dyadic);
    check_distribution(x, n, false);
    free(x);
}

TEST(prims, normal_distribution) {
    size_t n = wkt_quick() ? 1 << 15 : 1 << 20;
    float *x = malloc(n * sizeof *x);
    REQUIRE(x != NULL);
    uint64_t seed = wkt_u64(), seq = wkt_below(1000);
    for (size_t i = 0; i < n; i++)
        x[i] = wks_normal(seed, seq, i);
    check_distribution(x, n, true);
    free(x);
}

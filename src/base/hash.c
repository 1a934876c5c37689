/* wki_hash: 64 bytes a round in four independent lanes, each a widening multiply whose halves are folded back
 * together with the operands, so that a zero operand costs no state. Constants are the fractional bits of the
 * natural logarithms of 3, 5, 7, 23, 29 and 31, made odd. May call the C library alone. */
#include "base/hash.h"

#include <string.h>

#define K0 0x193ea7aad030a977u
#define K1 0x9c041f7ed8d336afu
#define K2 0xf2272ae325a57547u
#define K3 0x22afbfba367e0123u
#define K4 0x5e071979bfc3d7adu
#define K5 0x6f19c912256b3e23u

static inline uint64_t load64(const unsigned char *p) {
    uint64_t v;
    memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

static inline uint64_t mix(uint64_t a, uint64_t b) {
    __uint128_t w = (__uint128_t)a * b;
    return ((uint64_t)w ^ a) + ((uint64_t)(w >> 64) ^ b);
}

/* The last 0 to 16 bytes as two words. Below 8 bytes the words are zero-extended; the length, mixed in by the
 * caller, tells padded inputs apart. */
static inline void load_tail(const unsigned char *p, size_t n, uint64_t *a, uint64_t *b) {
    if (n >= 8) {
        *a = load64(p);
        *b = load64(p + n - 8);
        return;
    }
    *a = *b = 0;
    for (size_t i = 0; i < n; i++)
        *a |= (uint64_t)p[i] << 8 * i;
}

uint64_t wki_hash(const void *data, size_t n, uint64_t seed) {
    const unsigned char *p = data;
    const uint64_t length = n;
    uint64_t h = mix(seed ^ K0, K1);
    if (n > 64) {
        uint64_t h1 = h ^ K2, h2 = h ^ K3, h3 = h ^ K4;
        do {
            h = mix(load64(p) ^ K1, load64(p + 8) ^ h);
            h1 = mix(load64(p + 16) ^ K2, load64(p + 24) ^ h1);
            h2 = mix(load64(p + 32) ^ K3, load64(p + 40) ^ h2);
            h3 = mix(load64(p + 48) ^ K4, load64(p + 56) ^ h3);
            p += 64;
            n -= 64;
        } while (n > 64);
        h = mix(h ^ K5, h1) ^ mix(h2 ^ K0, h3);
    }
    for (; n > 16; p += 16, n -= 16)
        h = mix(load64(p) ^ K2, load64(p + 8) ^ h);
    uint64_t a, b;
    load_tail(p, n, &a, &b);
    h = mix(a ^ K1, b ^ h);
    return mix(mix(h ^ K3, length ^ K4), K5);
}

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

static inline uint64_t load32(const unsigned char *p) {
    uint32_t v;
    memcpy(&v, p, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap32(v);
#endif
    return v;
}

static inline uint64_t mix(uint64_t a, uint64_t b) {
    __uint128_t w = (__uint128_t)a * b;
    return ((uint64_t)w ^ a) + ((uint64_t)(w >> 64) ^ b);
}

/* 0 to 16 bytes as two words that together hold each byte, some twice; one length, one layout. */
static inline void load_short(const unsigned char *p, size_t n, uint64_t *a, uint64_t *b) {
    if (n >= 8) {
        *a = load64(p);
        *b = load64(p + n - 8);
    } else if (n >= 4) {
        *a = load32(p);
        *b = load32(p + n - 4);
    } else {
        *a = n ? (uint64_t)p[0] | (uint64_t)p[n / 2] << 8 | (uint64_t)p[n - 1] << 16 : 0;
        *b = 0;
    }
}

/* The length enters at the start, so what the words of two lengths have in common does no harm. The last 16
 * bytes of an input of 17 or more are read as such, overlapping what went before. */
uint64_t wki_hash(const void *data, size_t n, uint64_t seed) {
    const unsigned char *p = data;
    uint64_t h = mix(seed ^ K0, (uint64_t)n ^ K1), a, b;
    if (n <= 16) {
        load_short(p, n, &a, &b);
        return mix(mix(a ^ K2, b ^ h) ^ K5, K3);
    }
    const unsigned char *last = p + n - 16;
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
    uint64_t s = h;
    if (n > 48)
        s += mix(load64(p + 32) ^ K0, load64(p + 40) ^ h);
    if (n > 32)
        s += mix(load64(p + 16) ^ K1, load64(p + 24) ^ h);
    if (n > 16)
        s += mix(load64(p) ^ K4, load64(p + 8) ^ h);
    return mix(mix(load64(last) ^ K2, load64(last + 8) ^ s) ^ K5, K3);
}

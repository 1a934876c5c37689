/* A fast 64-bit hash of bytes for tables and content-addressed names, and a mixer of integers. Not cryptographic: an adversary can
 * make collisions, so a hit that matters is compared in full. May call the C library alone. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* The same bytes and seed give the same value on every machine and in every version of the format; n may be
 * 0, and p then NULL. */
uint64_t wki_hash(const void *p, size_t n, uint64_t seed);

/* The next number of SplitMix64 (Steele, Lea, Flood 2014), which turns any state, 0 too, into well-spread numbers. */
static inline uint64_t wki_splitmix(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

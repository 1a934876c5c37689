/* A fast 64-bit hash of bytes for tables and content-addressed names. Not cryptographic: an adversary can
 * make collisions, so a hit that matters is compared in full. May call the C library alone. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* The same bytes and seed give the same value on every machine and in every version of the format; n may be
 * 0, and p then NULL. */
uint64_t wki_hash(const void *p, size_t n, uint64_t seed);

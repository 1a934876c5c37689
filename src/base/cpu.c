/* CPU features by CPUID and XGETBV bits, never by model name: virtual machines present any name with any bits.
 * Calls libc only. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/cpu.h"

#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Bit numbers from the Intel SDM, volume 2A, CPUID leaves 1 and 7, and volume 1, section 13.3 (XCR0). */
enum {
    LEAF1_ECX_FMA = 12,
    LEAF1_ECX_OSXSAVE = 27,
    LEAF1_ECX_AVX = 28,
    LEAF7_EBX_AVX2 = 5,
    LEAF7_EBX_AVX512F = 16,
    LEAF7_EBX_AVX512DQ = 17,
    LEAF7_EBX_AVX512BW = 30,
    LEAF7_EBX_AVX512VL = 31,
};
#define XCR0_YMM 0x06u /* SSE and AVX state */
#define XCR0_ZMM 0xe6u /* those, opmasks and both halves of the ZMM state */

static uint32_t xcr0(void) {
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return lo;
}

static int has(uint32_t word, int bit) { return (int)(word >> bit & 1); }

static wki_isa detect(void) {
    uint32_t eax, ebx, ecx, edx, b7, c7;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx))
        return WKI_ISA_BASELINE;
    if (!has(ecx, LEAF1_ECX_OSXSAVE) || !has(ecx, LEAF1_ECX_AVX) || !has(ecx, LEAF1_ECX_FMA))
        return WKI_ISA_BASELINE;
    if (!__get_cpuid_count(7, 0, &eax, &b7, &c7, &edx))
        return WKI_ISA_BASELINE;
    uint32_t state = xcr0();
    if (!has(b7, LEAF7_EBX_AVX2) || (state & XCR0_YMM) != XCR0_YMM)
        return WKI_ISA_BASELINE;
    int wide = has(b7, LEAF7_EBX_AVX512F) && has(b7, LEAF7_EBX_AVX512BW) && has(b7, LEAF7_EBX_AVX512DQ) &&
               has(b7, LEAF7_EBX_AVX512VL);
    return wide && (state & XCR0_ZMM) == XCR0_ZMM ? WKI_ISA_AVX512 : WKI_ISA_AVX2;
}
#else
static wki_isa detect(void) { return WKI_ISA_BASELINE; }
#endif

const char *wki_isa_name(wki_isa isa) {
    switch (isa) {
    case WKI_ISA_AVX512:
        return "avx512";
    case WKI_ISA_AVX2:
        return "avx2";
    case WKI_ISA_BASELINE:
        break;
    }
    return "baseline";
}

static wki_isa resolve(const char **note) {
    wki_isa best = detect();
    const char *want = getenv("WICK_CPU_ISA");
    *note = NULL;
    if (!want || !*want)
        return best;
    for (wki_isa isa = WKI_ISA_BASELINE; isa <= WKI_ISA_AVX512; isa++) {
        if (strcmp(want, wki_isa_name(isa)) != 0)
            continue;
        if (isa <= best)
            return isa;
        *note = "WICK_CPU_ISA ignored: this machine does not support the tier it names";
        return best;
    }
    *note = "WICK_CPU_ISA ignored: not one of baseline, avx2, avx512";
    return best;
}

wki_isa wki_cpu_isa(void) {
    const char *note;
    return resolve(&note);
}

const char *wki_cpu_isa_note(void) {
    const char *note;
    resolve(&note);
    return note;
}

int wki_cpu_count(void) {
#if defined(__linux__)
    cpu_set_t set[64]; /* 65,536 CPUs: the kernel refuses a set smaller than its own */
    memset(set, 0, sizeof set);
    if (sched_getaffinity(0, sizeof set, set) == 0) {
        int n = CPU_COUNT_S(sizeof set, set);
        if (n > 0)
            return n;
    }
#endif
    long n_online = sysconf(_SC_NPROCESSORS_ONLN);
    return n_online > 0 ? (int)n_online : 1;
}

/* CPU features, read once by whoever starts a runtime and then carried as a value. Calls libc only. */
#pragma once

/* Tiers of kernels, each a superset of the one before:
 *   BASELINE  what the ABI guarantees (SSE2 on x86-64, NEON on aarch64)
 *   AVX2      AVX2 and FMA
 *   AVX512    AVX-512 F, BW, DQ and VL beside those */
typedef enum { WKI_ISA_BASELINE, WKI_ISA_AVX2, WKI_ISA_AVX512 } wki_isa;

/* The highest tier that both the CPU and the operating system (saved register state) support, lowered by the
 * environment variable WICK_CPU_ISA=baseline|avx2|avx512. Executes CPUID, which traps for tens of microseconds in
 * a virtual machine: call once and keep the answer. */
wki_isa wki_cpu_isa(void);

/* Why WICK_CPU_ISA was ignored, or NULL if it was obeyed or absent. A constant string. */
const char *wki_cpu_isa_note(void);

/* "baseline", "avx2" or "avx512": also the values of WICK_CPU_ISA. */
const char *wki_isa_name(wki_isa isa);

/* Number of CPUs that this process may run on; at least 1. */
int wki_cpu_count(void);

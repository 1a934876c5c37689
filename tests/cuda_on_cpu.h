/* The CUDA built-ins that generated kernels use, defined in C, so that their text runs on the CPU: a test
 * writes this file, the prelude, the kernels and CUDA_ON_CPU(name) for each to a file and compiles that as C
 * into a shared object. The threads of a block are fibers that really wait for each other in barriers and
 * shuffles; which runs when is drawn from a seed, so that a missing barrier shows. Only what CUDA C++
 * promises is given: a barrier that some threads of the block have left behind for good, or a shuffle that
 * not all lanes take part in, is an error. Uses the C library and POSIX alone. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__ __attribute__((unused))
#define __forceinline__ inline
#define __shared__ static

typedef struct {
    unsigned x, y, z;
} cuda_dim;
static cuda_dim threadIdx, blockIdx, blockDim, gridDim;

/* ---- fibers -------------------------------------------------------------------------------------------- */

enum { CUDA_READY, CUDA_WARP_WAIT, CUDA_BLOCK_WAIT, CUDA_DONE };
enum { CUDA_THREADS = 1024, CUDA_STACK = 48 << 10 };

typedef struct {
    ucontext_t context;
    int state;
    int turn;     /* of the two places for a value */
    int value[2]; /* given in a shuffle */
} cuda_fiber;

static cuda_fiber cuda_fibers[CUDA_THREADS], *cuda_now;
static ucontext_t cuda_scheduler;
static char cuda_stacks[CUDA_THREADS][CUDA_STACK] __attribute__((aligned(64)));
static void (*cuda_thread)(void);
static const void *cuda_params;
static const unsigned long long *cuda_args;
static uint64_t cuda_random;

static unsigned cuda_draw(unsigned n) {
    cuda_random = cuda_random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(cuda_random >> 33) % n;
}

static void cuda_wait(int state) {
    cuda_fiber *me = cuda_now;
    me->state = state;
    swapcontext(&me->context, &cuda_scheduler);
}

static void cuda_fiber_main(void) {
    cuda_thread();
    cuda_wait(CUDA_DONE);
}

static void cuda_resume(unsigned t) {
    cuda_now = &cuda_fibers[t];
    threadIdx.x = t % blockDim.x;
    threadIdx.y = t / blockDim.x % blockDim.y;
    threadIdx.z = t / blockDim.x / blockDim.y;
    swapcontext(&cuda_scheduler, &cuda_now->context);
}

/* Lets go those who have waited for the last: warps, then the block. NULL, or what is wrong. */
static const char *cuda_release(unsigned n, int *live) {
    unsigned at_barrier = 0, done = 0, freed = 0, ready = 0;
    for (unsigned w = 0; w < n; w += 32) {
        unsigned lanes = n - w < 32 ? n - w : 32, waiting = 0, others = 0;
        for (unsigned t = w; t < w + lanes; t++) {
            waiting += cuda_fibers[t].state == CUDA_WARP_WAIT;
            others += cuda_fibers[t].state == CUDA_BLOCK_WAIT || cuda_fibers[t].state == CUDA_DONE;
            at_barrier += cuda_fibers[t].state == CUDA_BLOCK_WAIT;
            done += cuda_fibers[t].state == CUDA_DONE;
            ready += cuda_fibers[t].state == CUDA_READY;
        }
        if (waiting && (others || lanes < 32))
            return "some lanes of a warp are not in its shuffle";
        if (waiting < 32)
            continue;
        for (unsigned t = w; t < w + lanes; t++)
            cuda_fibers[t].state = CUDA_READY;
        freed += 32;
    }
    if (at_barrier && done)
        return "some threads of a block have ended before its barrier";
    if (at_barrier == n) {
        for (unsigned t = 0; t < n; t++)
            cuda_fibers[t].state = CUDA_READY;
        freed = n;
    }
    *live = done < n;
    return *live && !freed && !ready ? "a block stands still" : NULL;
}

static const char *cuda_block(void) {
    unsigned n = blockDim.x * blockDim.y * blockDim.z;
    for (unsigned t = 0; t < n; t++) {
        cuda_fiber *f = &cuda_fibers[t];
        f->state = CUDA_READY;
        f->turn = 0;
        getcontext(&f->context);
        f->context.uc_stack.ss_sp = cuda_stacks[t];
        f->context.uc_stack.ss_size = CUDA_STACK;
        f->context.uc_link = NULL;
        makecontext(&f->context, cuda_fiber_main, 0);
    }
    for (int live = 1; live;) {
        unsigned first = cuda_draw(n), sleeping = cuda_draw(4) ? cuda_draw((n + 31) / 32) : n;
        for (unsigned i = 0; i < n; i++) {
            unsigned t = (first + i) % n;
            if (cuda_fibers[t].state == CUDA_READY && t / 32 != sleeping)
                cuda_resume(t);
        }
        const char *wrong = cuda_release(n, &live);
        if (wrong)
            return wrong;
    }
    return NULL;
}

/* Runs a grid; NULL, or what is wrong. */
static const char *cuda_launch(void (*thread)(void), const void *params, const unsigned long long *args,
                               const unsigned grid[3], const unsigned block[3], uint64_t seed) {
    cuda_thread = thread;
    cuda_params = params;
    cuda_args = args;
    cuda_random = seed;
    gridDim = (cuda_dim){grid[0], grid[1], grid[2]};
    blockDim = (cuda_dim){block[0], block[1], block[2]};
    if (block[0] * block[1] * block[2] > CUDA_THREADS)
        return "a block is too large";
    for (unsigned b = 0; b < grid[0] * grid[1] * grid[2]; b++) {
        blockIdx = (cuda_dim){b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        const char *wrong = cuda_block();
        if (wrong)
            return wrong;
    }
    return NULL;
}

#define CUDA_ON_CPU(name)                                                                                    \
    static void name##_thread(void) { name(*(const name##_p *)cuda_params, cuda_args); }                     \
    const char *name##_run(const void *params, const unsigned long long *args, const unsigned grid[3],       \
                           const unsigned block[3], uint64_t seed) {                                         \
        return cuda_launch(name##_thread, params, args, grid, block, seed);                                  \
    }

/* ---- barriers and shuffles ----------------------------------------------------------------------------- */

static inline void __syncthreads(void) { cuda_wait(CUDA_BLOCK_WAIT); }
static inline void __syncwarp(void) { cuda_wait(CUDA_WARP_WAIT); }

/* Two places for values: who is the first in the next shuffle leaves those of this one alone. */
static inline int cuda_exchange(int v, unsigned lane) {
    cuda_fiber *me = cuda_now;
    int turn = me->turn;
    me->turn = !turn;
    me->value[turn] = v;
    cuda_wait(CUDA_WARP_WAIT);
    return cuda_fibers[((unsigned)(me - cuda_fibers) & ~31u) + lane].value[turn];
}

static inline int __shfl_sync(unsigned mask, int v, int from) {
    return cuda_exchange(v, mask == 0xffffffffu ? (unsigned)from & 31 : 0);
}

static inline int __shfl_down_sync(unsigned mask, int v, unsigned by) {
    unsigned lane = (unsigned)(cuda_now - cuda_fibers) & 31;
    return cuda_exchange(v, mask == 0xffffffffu && lane + by < 32 ? lane + by : lane);
}

/* ---- values -------------------------------------------------------------------------------------------- */

static inline int __float_as_int(float x) {
    int i;
    memcpy(&i, &x, sizeof i);
    return i;
}
static inline float __int_as_float(int i) {
    float x;
    memcpy(&x, &i, sizeof x);
    return x;
}
static inline double __longlong_as_double(long long i) {
    double x;
    memcpy(&x, &i, sizeof x);
    return x;
}
static inline float __int2float_rn(int i) { return (float)i; }
static inline int __float2int_rz(float x) { return (int)x; }
static inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}
static inline unsigned atomicInc(unsigned *p, unsigned most) {
    unsigned old = *p;
    *p = old >= most ? 0 : old + 1;
    return old;
}
static inline void __threadfence(void) {}

#define CUDA_ALIGNED(n) __attribute__((aligned(n)))
typedef struct {
    float x, y, z, w;
} CUDA_ALIGNED(16) float4;
typedef struct {
    int x, y, z, w;
} CUDA_ALIGNED(16) int4;
typedef struct {
    unsigned char x, y, z, w;
} CUDA_ALIGNED(4) uchar4;
typedef struct {
    double x, y;
} CUDA_ALIGNED(16) double2;
typedef struct {
    long long x, y;
} CUDA_ALIGNED(16) longlong2;

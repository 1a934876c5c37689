/* Products tile by tile, for kernels that differ in where their operands come from: a block sums up a tile
 * of TM x TN, with KT of the products' length in shared memory at a time while the next KT are on their
 * way. Its threads are KG groups, each for its part of every KT; a thread has RM x RN elements in
 * registers, its columns in pieces of at most 4. In which order an element's products are added follows
 * from these numbers and from where the length is split, never from the device. */
template <int TM_, int TN_, int RM_, int RN_, int KT_, int KG_> struct wkk_tile {
    enum { TM = TM_, TN = TN_, RM = RM_, RN = RN_, KT = KT_, KG = KG_ };
    enum { GROUP = TM / RM * (TN / RN), THREADS = GROUP * KG };
    enum { EA = TM * KT / THREADS, EB = TN * KT / THREADS };             /* a thread loads of each operand */
    enum { LDA = TM + (RM < 4 ? RM : 4), LDB = TN + (RN < 4 ? RN : 4) }; /* against bank conflicts */
    enum {
        EACH = TM * TN / THREADS,
        WIDE = EACH < 4 ? EACH : 4,
        HIGH = EACH / WIDE
    }; /* of the tile, in the end */
    struct alignas(16) stage {
        float a[KT][LDA], b[KT][LDB];
    };
    union alignas(16) memory {
        stage s[2];
        float part[KG > 1 ? KG : 1][TM * TN];
    };
    enum { PIECE = RN < 4 ? RN : 4, PIECES = RN / PIECE };
    /* Where group's threads sum. */
    static __device__ __forceinline__ int sum_row() { return (int)threadIdx.x % GROUP / (TN / RN) * RM; }
    static __device__ __forceinline__ int sum_column(int piece) {
        return piece * (TN / PIECES) + (int)threadIdx.x % (TN / RN) * PIECE;
    }
    /* Row and first column of part h of the elements that a thread has in the end. */
    static __device__ __forceinline__ int row(int h) {
        return KG == 1 ? sum_row() + h / PIECES : (int)threadIdx.x / (TN / WIDE) + h * (THREADS * WIDE / TN);
    }
    static __device__ __forceinline__ int column(int h) {
        return KG == 1 ? sum_column(h % PIECES) : (int)threadIdx.x % (TN / WIDE) * WIDE;
    }
};

template <int N> static __device__ __forceinline__ void wkk_take(float (&v)[N], const float *s) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 q = *(const float4 *)(s + i);
            v[i] = q.x, v[i + 1] = q.y, v[i + 2] = q.z, v[i + 3] = q.w;
        }
    } else {
        static_assert(N == 2, "pieces of 2 or a multiple of 4");
        float2 q = *(const float2 *)s;
        v[0] = q.x, v[1] = q.y;
    }
}

/* acc += the products of this thread's group in one stage. */
template <class T>
static __device__ __forceinline__ void wkk_tile_step(const typename T::stage &s, float (&acc)[T::RM][T::RN]) {
    int k0 = (int)threadIdx.x / T::GROUP * (T::KT / T::KG);
#pragma unroll
    for (int k = 0; k < T::KT / T::KG; k++) {
        float a[T::RM], b[T::PIECES][T::PIECE];
        wkk_take(a, &s.a[k0 + k][T::sum_row()]);
#pragma unroll
        for (int i = 0; i < T::PIECES; i++)
            wkk_take(b[i], &s.b[k0 + k][T::sum_column(i)]);
#pragma unroll
        for (int r = 0; r < T::RM; r++)
#pragma unroll
            for (int c = 0; c < T::RN; c++)
                acc[r][c] = __fmaf_rn(a[r], b[c / T::PIECE][c % T::PIECE], acc[r][c]);
    }
}

/* v = the sum over k0 <= k < k1 of the tile's elements at rows T::row(h), columns T::column(h) + w. The
 * loader's load(k, a, b) fetches what it puts into a stage with store(s, a, b). */
template <class T, class L>
static __device__ __forceinline__ void wkk_tile_sum(typename T::memory &m, L &l, wkk_i64 k0, wkk_i64 k1,
                                                    float (&v)[T::HIGH][T::WIDE]) {
    float acc[T::RM][T::RN] = {}, a[T::EA], b[T::EB];
    int at = 0;
    l.load(k0, a, b);
    l.store(m.s[0], a, b);
    __syncthreads();
    for (wkk_i64 k = k0;; k += T::KT) {
        bool more = k + T::KT < k1;
        if (more)
            l.load(k + T::KT, a, b);
        wkk_tile_step<T>(m.s[at], acc);
        if (!more)
            break;
        at ^= 1;
        l.store(m.s[at], a, b);
        __syncthreads();
    }
    if constexpr (T::KG == 1) {
#pragma unroll
        for (int h = 0; h < T::HIGH; h++)
#pragma unroll
            for (int w = 0; w < T::WIDE; w++)
                v[h][w] = acc[h / T::PIECES][h % T::PIECES * T::WIDE + w];
    } else {
        __syncthreads();
#pragma unroll
        for (int r = 0; r < T::RM; r++)
#pragma unroll
            for (int c = 0; c < T::RN; c++)
                m.part[threadIdx.x / T::GROUP]
                      [(T::sum_row() + r) * T::TN + T::sum_column(c / T::PIECE) + c % T::PIECE] = acc[r][c];
        __syncthreads();
#pragma unroll
        for (int h = 0; h < T::HIGH; h++)
#pragma unroll
            for (int w = 0; w < T::WIDE; w++) {
                const float *p = &m.part[0][T::row(h) * T::TN + T::column(h) + w];
                v[h][w] = p[0];
#pragma unroll
                for (int g = 1; g < T::KG; g++)
                    v[h][w] += p[g * T::TM * T::TN];
            }
    }
}

/* Several blocks have summed a stretch each of one tile: the last of them to arrive adds up all their sums
 * in order and goes on, with true. `part`: room for the tiles' sums; count[tile] is 0 before and after. */
template <class T>
static __device__ __forceinline__ bool wkk_tile_join(float (&v)[T::HIGH][T::WIDE], float *part,
                                                     wkk_u32 *count, wkk_i64 tile, int split, int splits) {
    enum { N = T::HIGH * T::WIDE, AT_ONCE = N < 32 ? 32 / N : 1 };
    __shared__ int last;
    if (splits == 1)
        return true;
    part += tile * splits * N * T::THREADS + threadIdx.x;
#pragma unroll
    for (int e = 0; e < N; e++)
        part[(split * N + e) * T::THREADS] = v[e / T::WIDE][e % T::WIDE];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(count + tile, (wkk_u32)splits - 1) == (wkk_u32)splits - 1;
    __syncthreads();
    if (!last)
        return false;
    __threadfence();
#pragma unroll
    for (int e = 0; e < N; e++)
        v[e / T::WIDE][e % T::WIDE] = __ldcg(part + e * T::THREADS);
#pragma unroll AT_ONCE
    for (int s = 1; s < splits; s++)
#pragma unroll
        for (int e = 0; e < N; e++)
            v[e / T::WIDE][e % T::WIDE] += __ldcg(part + (s * N + e) * T::THREADS);
    return true;
}

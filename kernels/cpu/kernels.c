/* Kernels for a CPU: moves of keys and values, attention of scattered rows, and decoder layers for a few rows. All
   functions are plain C over pointers.

   `body.h` is compiled once for each set of instructions. `library.py` asks `cachecraft_runs` which sets this CPU has.
   Threads belong to the OpenMP library that the process uses already (torch's own): a second pool would spin against
   it. */

#define _GNU_SOURCE 1
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define KNOWS_AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#define INLINE static inline __attribute__((always_inline))
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define NAME(x) JOIN(x, ISA)

typedef uint16_t half_t; /* bfloat16 */
typedef void (*job_t)(const void *context, long job);
typedef struct { job_t job; const void *context; long jobs, next; } region_t;
typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);

static parallel_t parallel; /* GOMP_parallel; 0 = one thread */

static void work(void *data) {
    region_t *region = data;
    for (;;) {
        long job = __atomic_fetch_add(&region->next, 1, __ATOMIC_RELAXED);
        if (job >= region->jobs) return;
        region->job(region->context, job);
    }
}

static void run(job_t job, const void *context, long jobs, long threads) {
    region_t region = {job, context, jobs, 0};
    if (threads > jobs) threads = jobs;
    if (threads > 1 && parallel) parallel(work, &region, (unsigned)threads, 0);
    else work(&region);
}

EXPORT void cachecraft_start(void *gomp_parallel) { parallel = (parallel_t)gomp_parallel; }

#if defined(KNOWS_AMX)
/* Return 1 if the CPU has tiles of bfloat16 and the system lets this process use them. */
static int has_tiles(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & d >> 24 & 1)) return 0;
    return !syscall(SYS_arch_prctl, 0x1023, 18); /* ARCH_REQ_XCOMP_PERM for the tiles' data */
}
#endif

/* Return the sets of instructions of this CPU and its system: bit 0 portable, 1 AVX2 and FMA, 2 AVX-512, 3 AVX-512 with
   bfloat16, 4 AMX with bfloat16. */
EXPORT long cachecraft_runs(void) {
    long found = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= 2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        found |= 4;
        if (__builtin_cpu_supports("avx512bf16")) found |= 8;
#if defined(KNOWS_AMX)
        if (found & 8 && has_tiles()) found |= 16;
#endif
    }
#endif
    return found;
}

enum {
    BLOCK = 64,     /* keys of a packed block */
    TILE = 24,      /* folded rows of a tile, without AMX */
    WIDE = 128,     /* keys of a step of attention */
    MOST_DIM = 256, /* largest head_dim */
    MASS_ROWS = 8,  /* rows of a job of `mass` */
    FEW = 12,       /* up to this many folded rows are attended without packing */
    PART = 256,     /* keys of a job of a few rows */
    AHEAD = 16      /* keys to prefetch */
};

/* Arguments of `attend` and `mass`. Strides are in elements. Rows ascend by position. Keys from `keys` on are not read. */
typedef struct {
    const void *q, *k, *v;
    void *out, *packed;
    const int64_t *positions, *bounds;
    const uint8_t *absent; /* [keys], 1 = hidden from every row; or 0 */
    float *mass, *received;
    long rows, heads, kv_heads, dim, keys, window, segments, threads, bfloat;
    long q_row, q_head, k_row, k_head, v_row, v_head;
    float scale, softcap; /* 0: no cap */
    const float *sinks;   /* [heads] or 0: the score of a position without a value, which each head may attend to */
} attend_t;

/* Arguments of `rotate`: rows of `x` are rotated into rows of `out`. */
typedef struct {
    const void *x;
    void *out;
    long x_row, x_head, out_row, out_head, heads;
} turn_t;

typedef struct {
    turn_t parts[2]; /* the second one may have 0 heads */
    const void *cos, *sin;
    long rows, dim, width, turn_row, bfloat;
} rotate_t;

/* Arguments of `place` and `drift`: the merged buffer, and rows to write or to compare. Strides are in elements. */
typedef struct {
    void *k, *v; /* the merged buffer: rows of [heads, dim], contiguous */
    const void *raw_k, *raw_v, *cos, *sin;
    long row, raw_row, turn_row, heads, dim, width, bfloat;
    /* For drift: row numbers (evidence) and positions (at) of recomputed tokens, the first of each chunk (edges), and the
       ranges of stale tokens (pieces, [chunk, start, stop]). */
    const int64_t *evidence, *at, *edges, *pieces;
    float *shift; /* [chunks, 2, heads · dim] */
    float strength;
    long tokens, grain;
} move_t;

/* Arguments of `norm`: x += add (if given), out = x / rms(x) · weight; and of `gated`: x = silu(x) · add. Rows are
   contiguous. */
typedef struct {
    void *x, *out;
    const void *add, *weight;
    long rows, width, bfloat;
    float eps;
} rows_t;

/* Arguments of `linear`: out = x · weightᵀ + bias, for a few contiguous rows. */
typedef struct {
    const void *x, *weight, *bias;
    void *out;
    long rows, width, outs, bfloat;
} linear_t;

typedef struct { linear_t parts[3]; } linears_t;

/* Arguments of `layer`: a whole decoder layer for a few rows, each with the keys and values of its own answer. Order of
   weights and biases: query, key, value, output, gate, up, down. */
typedef struct {
    const void *weights[7], *biases[7], *norm, *after_norm, *q_norm, *k_norm;
    void *hidden; /* [rows, hidden_size], changed in place */
    char *scratch;
    const uint64_t *k, *v, *cos, *sin; /* [rows], addresses: k and v of position 0, cos and sin of the row */
    const int64_t *positions;
    long rows, hidden_size, inner_size, heads, kv_heads, dim, width, key_row, window, threads, bfloat;
    float eps[4], scale, softcap; /* eps: norm, after_norm, q_norm, k_norm */
} layer_t;

#define PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#endif
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ < 22
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,fma,evex512" /* in these versions, vectors of 512 bits are an extra feature */
#else
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,fma"
#endif

#define ISA portable
#define VL 4
#define NV 2
#include "body.h"
#undef ISA
#undef VL
#undef NV

#if defined(__x86_64__)
TARGET("avx2,fma")
#define ISA avx2
#define VL 8
#define NV 2
#include "body.h"
#undef ISA
#undef VL
#undef NV
END_TARGET

TARGET(AVX512)
#define ISA avx512
#define VL 16
#define NV 4
#include "body.h"
#undef ISA
END_TARGET

TARGET(AVX512 ",avx512bf16")
#define ISA avx512_bf16
#define PAIRS 1
#include "body.h"
#undef ISA
END_TARGET

#if defined(KNOWS_AMX)
TARGET(AVX512 ",avx512bf16,amx-tile,amx-bf16")
#define ISA amx
#define TILES 1
#include "body.h"
END_TARGET
#endif
#endif

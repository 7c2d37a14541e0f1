/* The kernels for one set of instructions: ISA names it, VL floats are a vector, NV vectors are a step of products.
   With PAIRS, products of bfloat16 are taken two at a time, else in float32. */

#define F NAME(floats)
#define FU NAME(loose_floats)
#define I NAME(ints)
#define H NAME(halves)
#define HU NAME(loose_halves)
typedef float F __attribute__((vector_size(VL * 4)));
typedef float FU __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(VL * 4)));
typedef uint16_t H __attribute__((vector_size(VL * 2)));
typedef uint16_t HU __attribute__((vector_size(VL * 2), aligned(2), may_alias));
enum { NAME(STEP) = NV * VL };
#define STEP NAME(STEP)

/* -- numbers ------------------------------------------------------------------------------------------------------- */

INLINE F NAME(all)(float x) { return x - (F){}; }
INLINE F NAME(load)(const float *p) { return *(const FU *)p; }
INLINE void NAME(store)(float *p, F x) { *(FU *)p = x; }

INLINE F NAME(widen)(const half_t *p) {
#if VL == 16
    return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
#else
    H x = *(const HU *)p;
    return (F)(__builtin_convertvector(x, I) << 16);
#endif
}

INLINE void NAME(narrow)(half_t *p, F x) {
#if defined(PAIRS)
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    I bits = (I)x, odd = (bits >> 16) & 1, nan = x != x;
    I even = ((bits + 0x7fff + odd) >> 16) & 0xffff;
    even = (even & ~nan) | (nan & 0x7fc0);
    *(HU *)p = __builtin_convertvector(even, H);
#endif
}

INLINE float NAME(widen1)(half_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE half_t NAME(narrow1)(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (half_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE F NAME(get)(const void *p, long i, long bfloat) {
    return bfloat ? NAME(widen)((const half_t *)p + i) : NAME(load)((const float *)p + i);
}
INLINE void NAME(put)(void *p, long i, F x, long bfloat) {
    if (bfloat) NAME(narrow)((half_t *)p + i, x);
    else NAME(store)((float *)p + i, x);
}
INLINE float NAME(get1)(const void *p, long i, long bfloat) {
    return bfloat ? NAME(widen1)(((const half_t *)p)[i]) : ((const float *)p)[i];
}
INLINE void NAME(put1)(void *p, long i, float x, long bfloat) {
    if (bfloat) ((half_t *)p)[i] = NAME(narrow1)(x);
    else ((float *)p)[i] = x;
}

INLINE F NAME(larger)(F a, F b) {
#if VL == 16
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#else
    I m = a > b;
    return (F)(((I)a & m) | ((I)b & ~m));
#endif
}
INLINE float NAME(largest)(F x) {
#if VL == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < VL; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}
INLINE float NAME(sum)(F x) {
#if VL == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    float all = 0;
    for (int i = 0; i < VL; i++) all += x[i];
    return all;
#endif
}

/* 2^x, error 1e-7 of it; 0 below 2^-125 */
INLINE F NAME(power)(F x) {
#if VL == 16
    F n = (F)_mm512_roundscale_ps((__m512)x, 0x08), f = x - n;
#else
    I gone = x < -125.f;
    x = NAME(larger)(x, NAME(all)(-125.f));
    F n = (x + 12582912.f) - 12582912.f, f = x - n;
#endif
    F p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.f;
#if VL == 16
    return (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    I e = (__builtin_convertvector(n, I) + 127) << 23;
    return (F)((I)(p * (F)e) & ~gone);
#endif
}

/* -- rotation ------------------------------------------------------------------------------------------------------ */

/* One head turned by the angles of one position; `shift` (float, or 0) is added before. */
INLINE void NAME(turn)(void *out, const void *x, const void *cos, const void *sin, const float *shift, long dim,
                       long width, long bf) {
    long half = width / 2, i = 0;
    for (; i + VL <= half; i += VL) {
        F a = NAME(get)(x, i, bf), b = NAME(get)(x, half + i, bf);
        if (shift) a += NAME(load)(shift + i), b += NAME(load)(shift + half + i);
        F lo = a * NAME(get)(cos, i, bf) - b * NAME(get)(sin, i, bf);
        F hi = b * NAME(get)(cos, half + i, bf) + a * NAME(get)(sin, half + i, bf);
        NAME(put)(out, i, lo, bf);
        NAME(put)(out, half + i, hi, bf);
    }
    for (; i < half; i++) {
        float a = NAME(get1)(x, i, bf), b = NAME(get1)(x, half + i, bf);
        if (shift) a += shift[i], b += shift[half + i];
        float lo = a * NAME(get1)(cos, i, bf) - b * NAME(get1)(sin, i, bf);
        float hi = b * NAME(get1)(cos, half + i, bf) + a * NAME(get1)(sin, half + i, bf);
        NAME(put1)(out, i, lo, bf);
        NAME(put1)(out, half + i, hi, bf);
    }
    for (i = width; i < dim; i++) NAME(put1)(out, i, NAME(get1)(x, i, bf) + (shift ? shift[i] : 0.f), bf);
}

#define AT(p, i) ((void *)((char *)(p) + (i) * size))

INLINE void NAME(rotate_rows)(const rotate_t *c, long job, long bf) {
    long size = bf ? 2 : 4, stop = (job + 1) * 16 < c->rows ? (job + 1) * 16 : c->rows;
    for (long t = job * 16; t < stop; t++)
        for (int p = 0; p < 2; p++) {
            const turn_t *part = c->parts + p;
            for (long h = 0; h < part->heads; h++)
                NAME(turn)(AT(part->out, t * part->out_row + h * part->out_head),
                           AT(part->x, t * part->x_row + h * part->x_head), AT(c->cos, t * c->turn_row),
                           AT(c->sin, t * c->turn_row), 0, c->dim, c->width, bf);
        }
}
static void NAME(rotate_job)(const void *context, long job) {
    const rotate_t *c = context;
    if (c->bfloat) NAME(rotate_rows)(c, job, 1);
    else NAME(rotate_rows)(c, job, 0);
}
EXPORT void NAME(rotate)(const rotate_t *c, long threads) { run(NAME(rotate_job), c, (c->rows + 15) / 16, threads); }

/* -- moves --------------------------------------------------------------------------------------------------------- */

/* Raw keys and values of adjoining tokens into the merged ones, keys turned. */
INLINE void NAME(place_rows)(const move_t *c, long job, long bf) {
    long size = bf ? 2 : 4, row = c->heads * c->dim;
    long stop = (job + 1) * c->grain < c->tokens ? (job + 1) * c->grain : c->tokens;
    for (long t = job * c->grain; t < stop; t++) {
        for (long h = 0; h < c->heads; h++)
            NAME(turn)(AT(c->k, t * c->row + h * c->dim), AT(c->raw_k, t * c->raw_row + h * c->dim),
                       AT(c->cos, t * c->turn_row), AT(c->sin, t * c->turn_row), 0, c->dim, c->width, bf);
        memcpy(AT(c->v, t * c->row), AT(c->raw_v, t * c->raw_row), (size_t)(row * size));
    }
}
static void NAME(place_job)(const void *context, long job) {
    const move_t *c = context;
    if (c->bfloat) NAME(place_rows)(c, job, 1);
    else NAME(place_rows)(c, job, 0);
}
EXPORT void NAME(place)(const move_t *c, long threads) {
    run(NAME(place_job), c, (c->tokens + c->grain - 1) / c->grain, threads);
}

/* Mean change of a chunk's evidence, times the strength; keys (even jobs) turned back to position 0. */
INLINE void NAME(mean_change)(const move_t *c, long job, long bf) {
    long size = bf ? 2 : 4, chunk = job / 2, is_value = job % 2, half = c->width / 2;
    long first = c->edges[chunk], last = c->edges[chunk + 1], row = c->heads * c->dim;
    float *sum = c->shift + job * row;
    memset(sum, 0, (size_t)row * sizeof(float));
    for (long n = first; n < last; n++) {
        const void *now = AT(is_value ? c->raw_v : c->raw_k, c->evidence[n] * c->raw_row);
        const void *old = AT(is_value ? c->v : c->k, c->at[n] * c->row);
        const void *cos = AT(c->cos, c->at[n] * c->turn_row), *sin = AT(c->sin, c->at[n] * c->turn_row);
        for (long h = 0; h < c->heads; h++) {
            long o = h * c->dim, i = 0, from = is_value ? 0 : c->width;
            for (i = from; i + VL <= c->dim; i += VL)
                NAME(store)(sum + o + i, NAME(load)(sum + o + i) + NAME(get)(now, o + i, bf) - NAME(get)(old, o + i, bf));
            for (; i < c->dim; i++) sum[o + i] += NAME(get1)(now, o + i, bf) - NAME(get1)(old, o + i, bf);
            if (is_value) continue;
            for (i = 0; i + VL <= half; i += VL) {
                F a = NAME(get)(now, o + i, bf) - NAME(get)(old, o + i, bf);
                F b = NAME(get)(now, o + half + i, bf) - NAME(get)(old, o + half + i, bf);
                F cl = NAME(get)(cos, i, bf), ch = NAME(get)(cos, half + i, bf);
                F sl = NAME(get)(sin, i, bf), sh = NAME(get)(sin, half + i, bf);
                F ll = cl * cl + sl * sl, lh = ch * ch + sh * sh; /* 1, but for rope scalings that stretch */
                NAME(store)(sum + o + i, NAME(load)(sum + o + i) + (a * cl + b * sl) / ll);
                NAME(store)(sum + o + half + i, NAME(load)(sum + o + half + i) + (b * ch - a * sh) / lh);
            }
            for (; i < half; i++) {
                float a = NAME(get1)(now, o + i, bf) - NAME(get1)(old, o + i, bf);
                float b = NAME(get1)(now, o + half + i, bf) - NAME(get1)(old, o + half + i, bf);
                float cl = NAME(get1)(cos, i, bf), ch = NAME(get1)(cos, half + i, bf);
                float sl = NAME(get1)(sin, i, bf), sh = NAME(get1)(sin, half + i, bf);
                sum[o + i] += (a * cl + b * sl) / (cl * cl + sl * sl);
                sum[o + half + i] += (b * ch - a * sh) / (ch * ch + sh * sh);
            }
        }
    }
    for (long i = 0; i < row; i++) sum[i] *= c->strength / (float)(last - first);
}
static void NAME(mean_job)(const void *context, long job) {
    const move_t *c = context;
    if (c->bfloat) NAME(mean_change)(c, job, 1);
    else NAME(mean_change)(c, job, 0);
}

/* A piece's keys and values moved by its chunk's shift. */
INLINE void NAME(shift_rows)(const move_t *c, long job, long bf) {
    long size = bf ? 2 : 4, row = c->heads * c->dim, half = c->width / 2;
    const int64_t *piece = c->pieces + 3 * job;
    const float *key = c->shift + 2 * piece[0] * row, *value = key + row;
    for (long t = piece[1]; t < piece[2]; t++) {
        void *k = AT(c->k, t * c->row), *v = AT(c->v, t * c->row);
        const void *cos = AT(c->cos, t * c->turn_row), *sin = AT(c->sin, t * c->turn_row);
        for (long h = 0; h < c->heads; h++) {
            long o = h * c->dim, i = 0;
            for (; i + VL <= half; i += VL) {
                F a = NAME(load)(key + o + i), b = NAME(load)(key + o + half + i);
                F lo = a * NAME(get)(cos, i, bf) - b * NAME(get)(sin, i, bf);
                F hi = b * NAME(get)(cos, half + i, bf) + a * NAME(get)(sin, half + i, bf);
                NAME(put)(k, o + i, NAME(get)(k, o + i, bf) + lo, bf);
                NAME(put)(k, o + half + i, NAME(get)(k, o + half + i, bf) + hi, bf);
            }
            for (; i < half; i++) {
                float a = key[o + i], b = key[o + half + i];
                float lo = a * NAME(get1)(cos, i, bf) - b * NAME(get1)(sin, i, bf);
                float hi = b * NAME(get1)(cos, half + i, bf) + a * NAME(get1)(sin, half + i, bf);
                NAME(put1)(k, o + i, NAME(get1)(k, o + i, bf) + lo, bf);
                NAME(put1)(k, o + half + i, NAME(get1)(k, o + half + i, bf) + hi, bf);
            }
            for (i = c->width; i < c->dim; i++) NAME(put1)(k, o + i, NAME(get1)(k, o + i, bf) + key[o + i], bf);
        }
        long i = 0;
        for (; i + VL <= row; i += VL) NAME(put)(v, i, NAME(get)(v, i, bf) + NAME(load)(value + i), bf);
        for (; i < row; i++) NAME(put1)(v, i, NAME(get1)(v, i, bf) + value[i], bf);
    }
}
static void NAME(shift_job)(const void *context, long job) {
    const move_t *c = context;
    if (c->bfloat) NAME(shift_rows)(c, job, 1);
    else NAME(shift_rows)(c, job, 0);
}
EXPORT void NAME(drift)(const move_t *c, long chunks, long pieces, long threads) {
    run(NAME(mean_job), c, 2 * chunks, threads);
    run(NAME(shift_job), c, pieces, threads);
}

/* -- parts of layers ----------------------------------------------------------------------------------------------- */

/* Rounded where the models' own modules round: after the sum, after the division, after the product. */
INLINE F NAME(rounded)(F x, long bf) {
    if (!bf) return x;
    half_t half[VL];
    NAME(narrow)(half, x);
    return NAME(widen)(half);
}
INLINE float NAME(rounded1)(float x, long bf) { return bf ? NAME(widen1)(NAME(narrow1)(x)) : x; }

INLINE void NAME(norm_rows)(const rows_t *c, long job, long bf) {
    long size = bf ? 2 : 4, stop = (job + 1) * 8 < c->rows ? (job + 1) * 8 : c->rows, width = c->width;
    for (long row = job * 8; row < stop; row++) {
        void *x = AT(c->x, row * width), *out = AT(c->out, row * width);
        const void *add = c->add ? AT(c->add, row * width) : 0;
        F squares = {};
        float rest = 0;
        long i = 0;
        for (; i + VL <= width; i += VL) {
            F y = NAME(get)(x, i, bf);
            if (add) {
                y = NAME(rounded)(y + NAME(get)(add, i, bf), bf);
                NAME(put)(x, i, y, bf);
            }
            squares += y * y;
        }
        for (; i < width; i++) {
            float y = NAME(get1)(x, i, bf);
            if (add) {
                y = NAME(rounded1)(y + NAME(get1)(add, i, bf), bf);
                NAME(put1)(x, i, y, bf);
            }
            rest += y * y;
        }
        float share = 1.f / sqrtf((NAME(sum)(squares) + rest) / (float)width + c->eps);
        for (i = 0; i + VL <= width; i += VL)
            NAME(put)(out, i, NAME(rounded)(NAME(get)(x, i, bf) * share, bf) * NAME(get)(c->weight, i, bf), bf);
        for (; i < width; i++)
            NAME(put1)(out, i, NAME(rounded1)(NAME(get1)(x, i, bf) * share, bf) * NAME(get1)(c->weight, i, bf), bf);
    }
}
static void NAME(norm_job)(const void *context, long job) {
    const rows_t *c = context;
    if (c->bfloat) NAME(norm_rows)(c, job, 1);
    else NAME(norm_rows)(c, job, 0);
}
EXPORT void NAME(norm)(const rows_t *c, long threads) { run(NAME(norm_job), c, (c->rows + 7) / 8, threads); }

INLINE void NAME(gated_rows)(const rows_t *c, long job, long bf) {
    long i = job * 8 * c->width, stop = (job + 1) * 8 < c->rows ? (job + 1) * 8 * c->width : c->rows * c->width;
    for (; i + VL <= stop; i += VL) {
        F x = NAME(get)(c->x, i, bf), low = (F)((I)x | (I)NAME(all)(-0.f)); /* -|x| */
        F e = NAME(power)(low * 1.44269504f), one = 1.f / (1.f + e);
        I below = x < 0.f;
        F gate = (F)(((I)(e * one) & below) | ((I)one & ~below));
        NAME(put)(c->x, i, NAME(rounded)(x * gate, bf) * NAME(get)(c->add, i, bf), bf);
    }
    for (; i < stop; i++) {
        float x = NAME(get1)(c->x, i, bf);
        NAME(put1)(c->x, i, NAME(rounded1)(x / (1.f + expf(-x)), bf) * NAME(get1)(c->add, i, bf), bf);
    }
}
static void NAME(gated_job)(const void *context, long job) {
    const rows_t *c = context;
    if (c->bfloat) NAME(gated_rows)(c, job, 1);
    else NAME(gated_rows)(c, job, 0);
}
EXPORT void NAME(gated)(const rows_t *c, long threads) { run(NAME(gated_job), c, (c->rows + 7) / 8, threads); }

/* A product of few rows: the weights are read once, at the memory's speed. */
INLINE void NAME(linear_outs)(const linear_t *c, long job, long bf) {
    long size = bf ? 2 : 4, width = c->width, stop = (job + 1) * 32 < c->outs ? (job + 1) * 32 : c->outs;
    for (long n = job * 32; n < stop; n += 4) {
        const void *w[4];
        for (long j = 0; j < 4; j++) w[j] = AT(c->weight, (n + j < stop ? n + j : n) * width);
        for (long row = 0; row < c->rows; row++) {
            const void *x = AT(c->x, row * width);
            F s[4] = {};
            float found[4];
            long k = 0;
#if defined(PAIRS)
            if (bf) {
                __m512 t[4] = {};
                for (; k + 32 <= width; k += 32) {
                    __m512bh y = (__m512bh)_mm512_loadu_si512((const half_t *)x + k);
#pragma GCC unroll 4
                    for (long j = 0; j < 4; j++)
                        t[j] = _mm512_dpbf16_ps(t[j], (__m512bh)_mm512_loadu_si512((const half_t *)w[j] + k), y);
                }
                for (long j = 0; j < 4; j++) s[j] = (F)t[j];
            }
#endif
            for (; k + VL <= width; k += VL) {
                F y = NAME(get)(x, k, bf);
#pragma GCC unroll 4
                for (long j = 0; j < 4; j++) s[j] += NAME(get)(w[j], k, bf) * y;
            }
            for (long j = 0; j < 4; j++) found[j] = NAME(sum)(s[j]);
            for (; k < width; k++)
                for (long j = 0; j < 4; j++) found[j] += NAME(get1)(w[j], k, bf) * NAME(get1)(x, k, bf);
            for (long j = 0; j < 4 && n + j < stop; j++)
                NAME(put1)(c->out, row * c->outs + n + j, found[j] + (c->bias ? NAME(get1)(c->bias, n + j, bf) : 0.f), bf);
        }
    }
}
static void NAME(linear_job)(const void *context, long job) {
    const linear_t *c = context;
    if (c->bfloat) NAME(linear_outs)(c, job, 1);
    else NAME(linear_outs)(c, job, 0);
}
EXPORT void NAME(linear)(const linear_t *c, long threads) { run(NAME(linear_job), c, (c->outs + 31) / 32, threads); }

/* -- products ------------------------------------------------------------------------------------------------------ */

/* c[6, STEP] (+)= a[6, n] · b[n, STEP]; a's rows are lda apart, b's ldb, c's ldc. */
INLINE void NAME(product)(const float *a, long lda, const float *b, long ldb, float *c, long ldc, long n, int add) {
    F s[6][NV];
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) s[i][j] = add ? NAME(load)(c + i * ldc + j * VL) : (F){};
    for (long k = 0; k < n; k++) {
        F y[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) y[j] = NAME(load)(b + k * ldb + j * VL);
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) {
            F x = NAME(all)(a[i * lda + k]);
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) s[i][j] += x * y[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) NAME(store)(c + i * ldc + j * VL, s[i][j]);
}

#if defined(PAIRS)
/* The same of pairs of bfloat16: a[6, n], b[n, STEP]. */
INLINE void NAME(product2)(const uint32_t *a, long lda, const uint32_t *b, long ldb, float *c, long ldc, long n, int add) {
    __m512 s[6][NV];
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) s[i][j] = add ? _mm512_loadu_ps(c + i * ldc + j * VL) : _mm512_setzero_ps();
    for (long k = 0; k < n; k++) {
        __m512i y[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) y[j] = _mm512_loadu_si512(b + k * ldb + j * VL);
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) {
            __m512i x = _mm512_set1_epi32((int)a[i * lda + k]);
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) s[i][j] = _mm512_dpbf16_ps(s[i][j], (__m512bh)x, (__m512bh)y[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) _mm512_storeu_ps(c + i * ldc + j * VL, s[i][j]);
}
#endif

/* -- attention ----------------------------------------------------------------------------------------------------- */

#if defined(PAIRS)
#define PAIRED(c) ((c)->bfloat)
#else
#define PAIRED(c) 0
#endif

/* Packed, for each key/value head: keys [blocks][dim (pairs: / 2)][64], then values [blocks · 64 (/ 2)][padded dim]. */
INLINE long NAME(padded)(const attend_t *c) { return (c->dim + BLOCK - 1) / BLOCK * BLOCK; }
INLINE long NAME(blocks)(const attend_t *c) { return (c->keys + WIDE - 1) / WIDE * (WIDE / BLOCK); }
INLINE long NAME(key_words)(const attend_t *c) { return BLOCK * (PAIRED(c) ? c->dim / 2 : c->dim); }
INLINE long NAME(value_words)(const attend_t *c) { return BLOCK / (PAIRED(c) ? 2 : 1) * NAME(padded)(c); }
INLINE uint32_t *NAME(keys_of)(const attend_t *c, long head) {
    return (uint32_t *)c->packed + head * NAME(blocks)(c) * NAME(key_words)(c);
}
INLINE uint32_t *NAME(values_of)(const attend_t *c, long head) {
    long blocks = NAME(blocks)(c);
    return (uint32_t *)c->packed + c->kv_heads * blocks * NAME(key_words)(c) + head * blocks * NAME(value_words)(c);
}

/* The first key that any row sees, and from which block on something is packed. */
INLINE long NAME(first_seen)(const attend_t *c, long row) {
    long first = c->window > 0 ? c->positions[row] - c->window + 1 : 0;
    return first > 0 ? first : 0;
}

INLINE void NAME(pack_block)(const attend_t *c, long job, long bf) {
    long size = bf ? 2 : 4, blocks = NAME(blocks)(c), head = job / blocks, block = job % blocks;
    long first = block * BLOCK, count = c->keys - first, dim = c->dim, padded = NAME(padded)(c);
    if (first + BLOCK <= NAME(first_seen)(c, 0) / WIDE * WIDE) return;
    if (count > BLOCK) count = BLOCK;
    if (count < 0) count = 0;
    uint32_t *to = NAME(keys_of)(c, head) + block * NAME(key_words)(c);
    const void *k = AT(c->k, first * c->k_row + head * c->k_head);
    if (PAIRED(c)) {
        for (long d = 0; d < dim / 2; d++) {
            uint32_t *o = to + d * BLOCK;
            for (long j = 0; j < count; j++) memcpy(o + j, AT(k, j * c->k_row + 2 * d), 4);
            for (long j = count; j < BLOCK; j++) o[j] = 0;
        }
    } else {
        float *o = (float *)to;
        for (long j = 0; j < count; j++)
            for (long d = 0; d < dim; d++) o[d * BLOCK + j] = NAME(get1)(AT(k, j * c->k_row), d, bf);
        for (long d = 0; d < dim; d++)
            for (long j = count; j < BLOCK; j++) o[d * BLOCK + j] = 0;
    }
    if (!c->v) return;
    to = NAME(values_of)(c, head) + block * NAME(value_words)(c);
    const void *v = AT(c->v, first * c->v_row + head * c->v_head);
    if (PAIRED(c)) {
        for (long j = 0; j < BLOCK; j += 2) {
            const half_t *x = AT(v, j * c->v_row), *y = AT(v, (j + 1) * c->v_row);
            uint32_t *o = to + j / 2 * padded;
            if (j + 1 < count)
                for (long d = 0; d < dim; d++) o[d] = x[d] | (uint32_t)y[d] << 16;
            else
                for (long d = 0; d < dim; d++) o[d] = j < count ? x[d] : 0;
            for (long d = dim; d < padded; d++) o[d] = 0;
        }
    } else
        for (long j = 0; j < BLOCK; j++) {
            float *o = (float *)to + j * padded;
            for (long d = 0; d < dim; d++) o[d] = j < count ? NAME(get1)(AT(v, j * c->v_row), d, bf) : 0;
            for (long d = dim; d < padded; d++) o[d] = 0;
        }
}
static void NAME(pack_job)(const void *context, long job) {
    const attend_t *c = context;
    if (c->bfloat) NAME(pack_block)(c, job, 1);
    else NAME(pack_block)(c, job, 0);
}

/* Folded rows of one key/value head: row · group + the query's number in its group. */
typedef struct {
    float q[TILE * MOST_DIM] __attribute__((aligned(64)));
    float s[TILE * WIDE] __attribute__((aligned(64)));
    long row[TILE]; /* of each folded row */
    long head[TILE], count, first_row, last_row;
} NAME(tile_t);
#define tile_t NAME(tile_t)

INLINE void NAME(take)(const attend_t *c, tile_t *tile, long kv_head, long first, long stop, long bf) {
    long size = bf ? 2 : 4, group = c->heads / c->kv_heads;
    tile->count = stop - first;
    tile->first_row = first / group;
    tile->last_row = (stop - 1) / group;
    memset(tile->q, 0, (size_t)(TILE * c->dim) * (PAIRED(c) ? 2 : 4));
    for (long i = 0; i < tile->count; i++) {
        long row = (first + i) / group, head = kv_head * group + (first + i) % group;
        const void *q = AT(c->q, row * c->q_row + head * c->q_head);
        tile->row[i] = row;
        tile->head[i] = head;
        if (PAIRED(c)) memcpy((half_t *)tile->q + i * c->dim, q, (size_t)c->dim * 2);
        else
            for (long d = 0; d < c->dim; d++) tile->q[i * c->dim + d] = NAME(get1)(q, d, bf);
    }
}

/* Products with keys become scores in units of log 2: scaled, capped, and those of keys that a row does not see gone. */
INLINE void NAME(finish)(const attend_t *c, tile_t *tile, float *scores, long key, long wide) {
    const float log2e = 1.44269504f;
    long lowest = c->positions[tile->first_row], highest = c->positions[tile->last_row];
    int hides = key + wide - 1 > lowest || (c->window > 0 && key <= highest - c->window) || c->absent;
    float factor = c->softcap ? c->scale * 2.f * log2e / c->softcap : c->scale * log2e;
    for (long i = 0; i < tile->count; i++) {
        float *s = scores + i * wide;
        for (long j = 0; j < wide; j += VL) {
            F x = NAME(load)(s + j) * factor;
            if (c->softcap) { /* tanh(y) = sign(y) (1 - e) / (1 + e), e = exp(-2 |y|) */
                I sign = (I)x & (I)NAME(all)(-0.f);
                F e = NAME(power)((F)((I)x | (I)NAME(all)(-0.f)));
                x = (F)((I)((1.f - e) / (1.f + e) * (c->softcap * log2e)) | sign);
            }
            NAME(store)(s + j, x);
        }
        if (!hides) continue;
        long own = c->positions[tile->row[i]], from = c->window > 0 ? own - c->window + 1 : 0;
        for (long j = 0; j < wide && from > key + j; j++) s[j] = -3e38f;
        for (long j = own + 1 > key ? own + 1 - key : 0; j < wide; j++) s[j] = -3e38f;
        if (c->absent)
            for (long j = 0; j < wide && key + j < c->keys; j++)
                if (c->absent[key + j]) s[j] = -3e38f;
    }
}

/* Scores of a tile's rows with the keys from `key` on. */
INLINE void NAME(scores)(const attend_t *c, tile_t *tile, long kv_head, long key) {
    const uint32_t *packed = NAME(keys_of)(c, kv_head) + key / BLOCK * NAME(key_words)(c);
    for (long b = 0; b < WIDE / BLOCK; b++, packed += NAME(key_words)(c))
        for (long i = 0; i < tile->count; i += 6)
            for (long j = 0; j < BLOCK; j += STEP) {
                float *s = tile->s + i * WIDE + b * BLOCK + j;
#if defined(PAIRS)
                if (c->bfloat) {
                    NAME(product2)((const uint32_t *)tile->q + i * c->dim / 2, c->dim / 2, packed + j, BLOCK, s, WIDE,
                                   c->dim / 2, 0);
                    continue;
                }
#endif
                NAME(product)(tile->q + i * c->dim, c->dim, (const float *)packed + j, BLOCK, s, WIDE, c->dim, 0);
            }
    NAME(finish)(c, tile, tile->s, key, WIDE);
}

INLINE void NAME(attend_tile)(const attend_t *c, long job, long bf) {
    long size = bf ? 2 : 4, group = c->heads / c->kv_heads, folded = c->rows * group, tiles = (folded + TILE - 1) / TILE;
    long kv_head = job % c->kv_heads, number = tiles - 1 - job / c->kv_heads; /* the longest first */
    long first = number * TILE, stop = first + TILE < folded ? first + TILE : folded, padded = NAME(padded)(c);
    tile_t tile;
    float o[TILE * MOST_DIM] __attribute__((aligned(64)));
    half_t p[TILE * WIDE] __attribute__((aligned(64)));
    float most[TILE], total[TILE];
    NAME(take)(c, &tile, kv_head, first, stop, bf);
    memset(o, 0, (size_t)(TILE * padded) * 4);
    memset(p, 0, sizeof p);
    for (long i = 0; i < TILE; i++) most[i] = -1e30f, total[i] = 0;
    for (long i = tile.count * WIDE; i < TILE * WIDE; i++) tile.s[i] = 0;
    long end = c->positions[tile.last_row] + 1;
    for (long key = NAME(first_seen)(c, tile.first_row) / WIDE * WIDE; key < end; key += WIDE) {
        NAME(scores)(c, &tile, kv_head, key);
        for (long i = 0; i < tile.count; i++) {
            float *s = tile.s + i * WIDE;
            F top = NAME(load)(s), all = {};
#pragma GCC unroll 8
            for (long j = VL; j < WIDE; j += VL) top = NAME(larger)(top, NAME(load)(s + j));
            float now = NAME(largest)(top);
            if (now > most[i]) {
                float keep = exp2f(most[i] - now);
                most[i] = now;
                total[i] *= keep;
                for (long d = 0; d < padded; d += VL) NAME(store)(o + i * padded + d, NAME(load)(o + i * padded + d) * keep);
            }
            F m = NAME(all)(most[i]);
#pragma GCC unroll 8
            for (long j = 0; j < WIDE; j += VL) {
                F e = NAME(power)(NAME(load)(s + j) - m);
                all += e;
                if (PAIRED(c)) NAME(narrow)(p + i * WIDE + j, e);
                else NAME(store)(s + j, e);
            }
            total[i] += NAME(sum)(all);
        }
        long left = end - key < WIDE ? end - key : WIDE;
        const uint32_t *v = NAME(values_of)(c, kv_head) + key / BLOCK * NAME(value_words)(c);
        for (long i = 0; i < tile.count; i += 6)
            for (long d = 0; d < padded; d += STEP) {
#if defined(PAIRS)
                if (c->bfloat) {
                    NAME(product2)((const uint32_t *)(p + i * WIDE), WIDE / 2, v + d, padded, o + i * padded + d, padded,
                                   (left + 1) / 2, 1);
                    continue;
                }
#endif
                NAME(product)(tile.s + i * WIDE, WIDE, (const float *)v + d, padded, o + i * padded + d, padded, left, 1);
            }
    }
    for (long i = 0; i < tile.count; i++) {
        void *out = AT(c->out, (tile.row[i] * c->heads + tile.head[i]) * c->dim);
        float share = 1.f / total[i];
        long d = 0;
        for (; d + VL <= c->dim; d += VL) NAME(put)(out, d, NAME(load)(o + i * padded + d) * share, bf);
        for (; d < c->dim; d++) NAME(put1)(out, d, o[i * padded + d] * share, bf);
    }
}
static void NAME(attend_job)(const void *context, long job) {
    const attend_t *c = context;
    if (c->bfloat) NAME(attend_tile)(c, job, 1);
    else NAME(attend_tile)(c, job, 0);
}

/* Few rows, such as a decode step's: keys and values are read as they lie, in parts of fixed length.
   `packed` takes of each part and row: its largest score, its sum, and [dim] weighted values. */
INLINE void NAME(few_part)(const attend_t *c, long job, long bf) {
    long size = bf ? 2 : 4, dim = c->dim, folded = c->rows * (c->heads / c->kv_heads);
    long kv_head = job % c->kv_heads, part = job / c->kv_heads, key = part * PART;
    long stop = key + PART < c->keys ? key + PART : c->keys;
    float *out = (float *)c->packed + job * folded * (dim + 2), scores[FEW * PART] __attribute__((aligned(64)));
    tile_t tile;
    attend_t wide = *c;
    wide.bfloat = 0; /* queries are taken as float32 below */
    tile.count = folded, tile.first_row = 0, tile.last_row = c->rows - 1;
    long group = c->heads / c->kv_heads;
    for (long i = 0; i < folded; i++) {
        const void *q = AT(c->q, i / group * c->q_row + (kv_head * group + i % group) * c->q_head);
        tile.row[i] = i / group;
        for (long d = 0; d < dim; d++) tile.q[i * dim + d] = NAME(get1)(q, d, bf);
    }
    for (long n = key; n < stop; n++) {
        const void *k = AT(c->k, n * c->k_row + kv_head * c->k_head);
        for (long i = 0; i < folded; i += 4) {
            F s[4] = {};
            const float *q[4];
            for (long j = 0; j < 4; j++) q[j] = tile.q + (i + j < folded ? i + j : i) * dim;
            long d = 0;
            for (; d + VL <= dim; d += VL) {
                F y = NAME(get)(k, d, bf);
#pragma GCC unroll 4
                for (long j = 0; j < 4; j++) s[j] += y * NAME(load)(q[j] + d);
            }
            for (long j = 0; j < 4 && i + j < folded; j++) {
                float sum = NAME(sum)(s[j]);
                for (long e = d; e < dim; e++) sum += NAME(get1)(k, e, bf) * q[j][e];
                scores[(i + j) * PART + n - key] = sum;
            }
        }
    }
    for (long i = 0; i < folded; i++)
        for (long j = stop - key; j < PART; j++) scores[i * PART + j] = 0;
    NAME(finish)(&wide, &tile, scores, key, PART);
    for (long i = 0; i < folded; i++) {
        float *s = scores + i * PART, *o = out + i * (dim + 2);
        F top = NAME(load)(s), all = {};
        for (long j = VL; j < PART; j += VL) top = NAME(larger)(top, NAME(load)(s + j));
        o[0] = NAME(largest)(top);
        if (o[0] < -1e30f) o[0] = -1e30f;
        for (long j = 0; j < PART; j += VL) {
            F e = NAME(power)(NAME(load)(s + j) - o[0]);
            all += e;
            NAME(store)(s + j, e);
        }
        o[1] = NAME(sum)(all);
        memset(o + 2, 0, (size_t)dim * 4);
    }
    long d = 0;
    for (; d + VL <= dim; d += VL)
        for (long i = 0; i < folded; i += 4) {
            F o[4] = {};
            const float *s[4];
            for (long j = 0; j < 4; j++) s[j] = scores + (i + j < folded ? i + j : i) * PART;
            for (long n = key; n < stop; n++) {
                F v = NAME(get)(AT(c->v, n * c->v_row + kv_head * c->v_head), d, bf);
#pragma GCC unroll 4
                for (long j = 0; j < 4; j++) o[j] += v * s[j][n - key];
            }
            for (long j = 0; j < 4 && i + j < folded; j++) NAME(store)(out + (i + j) * (dim + 2) + 2 + d, o[j]);
        }
    for (; d < dim; d++)
        for (long i = 0; i < folded; i++)
            for (long n = key; n < stop; n++)
                out[i * (dim + 2) + 2 + d] +=
                    scores[i * PART + n - key] * NAME(get1)(AT(c->v, n * c->v_row + kv_head * c->v_head), d, bf);
}
static void NAME(few_job)(const void *context, long job) {
    const attend_t *c = context;
    if (c->bfloat) NAME(few_part)(c, job, 1);
    else NAME(few_part)(c, job, 0);
}
static void NAME(few)(const attend_t *c) {
    long group = c->heads / c->kv_heads, folded = c->rows * group, dim = c->dim, size = c->bfloat ? 2 : 4;
    long parts = (c->keys + PART - 1) / PART;
    run(NAME(few_job), c, parts * c->kv_heads, c->threads);
    for (long head = 0; head < c->kv_heads; head++)
        for (long i = 0; i < folded; i++) {
            void *out = AT(c->out, (i / group * c->heads + head * group + i % group) * dim);
            float most = -1e30f, total = 0, sum[MOST_DIM] = {};
            for (long part = 0; part < parts; part++) {
                const float *o = (const float *)c->packed + ((part * c->kv_heads + head) * folded + i) * (dim + 2);
                most = o[0] > most ? o[0] : most;
            }
            for (long part = 0; part < parts; part++) {
                const float *o = (const float *)c->packed + ((part * c->kv_heads + head) * folded + i) * (dim + 2);
                float share = exp2f(o[0] - most);
                total += share * o[1];
                for (long d = 0; d < dim; d++) sum[d] += share * o[2 + d];
            }
            for (long d = 0; d < dim; d++) NAME(put1)(out, d, sum[d] / total, c->bfloat);
        }
}

EXPORT void NAME(attend)(const attend_t *c) {
    long folded = c->rows * (c->heads / c->kv_heads);
    if (folded <= FEW) {
        NAME(few)(c);
        return;
    }
    run(NAME(pack_job), c, c->kv_heads * NAME(blocks)(c), c->threads);
    run(NAME(attend_job), c, c->kv_heads * ((folded + TILE - 1) / TILE), c->threads);
}

/* -- a whole layer ------------------------------------------------------------------------------------------------- */

static void NAME(linears_job)(const void *context, long job) {
    const linears_t *c = context;
    for (long part = 0; part < 3; part++) {
        long jobs = (c->parts[part].outs + 31) / 32;
        if (job < jobs) {
            NAME(linear_job)(c->parts + part, job);
            return;
        }
        job -= jobs;
    }
}
static void NAME(linears)(const layer_t *c, const void *x, long width, long first, long count, void *const *out,
                          const long *outs) {
    linears_t all = {};
    long jobs = 0;
    for (long n = 0; n < count; n++) {
        all.parts[n] =
            (linear_t){x, c->weights[first + n], c->biases[first + n], out[n], c->rows, width, outs[n], c->bfloat};
        jobs += (outs[n] + 31) / 32;
    }
    run(NAME(linears_job), &all, jobs, c->threads);
}

EXPORT void NAME(layer)(const layer_t *c) {
    long bf = c->bfloat, size = bf ? 2 : 4, rows = c->rows, hidden = c->hidden_size, inner = c->inner_size;
    long own[] = {c->heads * c->dim, c->kv_heads * c->dim, c->kv_heads * c->dim}, wide[] = {inner, inner};
    char *free = c->scratch;
#define ROOM(count) (free += ((rows * (count) * size) + 63) / 64 * 64, free - ((rows * (count) * size) + 63) / 64 * 64)
    void *x = ROOM(hidden), *qkv[] = {ROOM(own[0]), ROOM(own[1]), ROOM(own[2])}, *seen = ROOM(own[0]);
    void *added = ROOM(hidden), *gates[] = {ROOM(inner), ROOM(inner)};
#undef ROOM
    rows_t norm = {c->hidden, x, 0, c->norm, rows, hidden, bf, c->eps[0]};
    NAME(norm)(&norm, 1);
    NAME(linears)(c, x, hidden, 0, 3, qkv, own);
    if (c->q_norm) {
        rows_t of_q = {qkv[0], qkv[0], 0, c->q_norm, rows * c->heads, c->dim, bf, c->eps[2]};
        rows_t of_k = {qkv[1], qkv[1], 0, c->k_norm, rows * c->kv_heads, c->dim, bf, c->eps[3]};
        NAME(norm)(&of_q, 1);
        NAME(norm)(&of_k, 1);
    }
    for (long row = 0; row < rows; row++) {
        const void *cos = (const void *)c->cos[row], *sin = (const void *)c->sin[row];
        void *k = AT(c->k[row], c->positions[row] * c->key_row), *v = AT(c->v[row], c->positions[row] * c->key_row);
        for (long part = 0; part < 2; part++)
            for (long h = 0; h < own[part] / c->dim; h++) {
                void *from = AT(qkv[part], row * own[part] + h * c->dim), *to = part ? AT(k, h * c->dim) : from;
                if (bf) NAME(turn)(to, from, cos, sin, 0, c->dim, c->width, 1);
                else NAME(turn)(to, from, cos, sin, 0, c->dim, c->width, 0);
            }
        memcpy(v, AT(qkv[2], row * own[2]), (size_t)(own[2] * size));
    }
    for (long row = 0; row < rows; row++) { /* once all are written: rows may be of one answer */
        attend_t one = {.q = AT(qkv[0], row * own[0]), .k = (const void *)c->k[row], .v = (const void *)c->v[row],
                        .out = AT(seen, row * own[0]), .packed = free, .positions = c->positions + row, .rows = 1,
                        .heads = c->heads, .kv_heads = c->kv_heads, .dim = c->dim, .keys = c->positions[row] + 1,
                        .window = c->window, .threads = c->threads, .bfloat = bf, .q_row = own[0], .q_head = c->dim,
                        .k_row = c->key_row, .k_head = c->dim, .v_row = c->key_row, .v_head = c->dim,
                        .scale = c->scale, .softcap = c->softcap};
        NAME(few)(&one);
    }
    NAME(linears)(c, seen, own[0], 3, 1, &added, &hidden);
    norm.add = added, norm.weight = c->after_norm, norm.eps = c->eps[1];
    NAME(norm)(&norm, 1);
    NAME(linears)(c, x, hidden, 4, 2, gates, wide);
    rows_t gated = {gates[0], 0, gates[1], 0, rows, inner, bf, 0};
    NAME(gated)(&gated, 1);
    NAME(linears)(c, gates[0], inner, 6, 1, &added, &hidden);
    for (long i = 0; i < rows * hidden; i++)
        NAME(put1)(c->hidden, i, NAME(get1)(c->hidden, i, bf) + NAME(get1)(added, i, bf), bf);
}

/* -- attention mass ------------------------------------------------------------------------------------------------ */

/* Weights of some rows, averaged over the heads: to each segment, and to each key from all of these rows. */
INLINE void NAME(mass_rows)(const attend_t *c, long job, long bf) {
    long group = c->heads / c->kv_heads, first = job * MASS_ROWS;
    long stop = first + MASS_ROWS < c->rows ? first + MASS_ROWS : c->rows, end = c->positions[stop - 1] + 1;
    float *received = c->received + job * NAME(blocks)(c) * BLOCK, *mass = c->mass + first * c->segments;
    float seen[MASS_ROWS * WIDE] __attribute__((aligned(64)));
    tile_t tile;
    memset(received, 0, (size_t)(NAME(blocks)(c) * BLOCK) * 4);
    memset(mass, 0, (size_t)((stop - first) * c->segments) * 4);
    float most[MASS_ROWS * c->heads], total[MASS_ROWS * c->heads];
    for (long n = 0; n < MASS_ROWS * c->heads; n++) most[n] = -1e30f, total[n] = 0;
    for (int pass = 0; pass < 2; pass++)
        for (long key = NAME(first_seen)(c, first) / WIDE * WIDE; key < end; key += WIDE) {
            if (pass) memset(seen, 0, sizeof seen);
            for (long kv_head = 0; kv_head < c->kv_heads; kv_head++)
                for (long f = first * group; f < stop * group; f += TILE) {
                    long last = f + TILE < stop * group ? f + TILE : stop * group;
                    NAME(take)(c, &tile, kv_head, f, last, bf);
                    NAME(scores)(c, &tile, kv_head, key);
                    for (long i = 0; i < tile.count; i++) {
                        float *s = tile.s + i * WIDE;
                        long row = tile.row[i] - first, n = row * c->heads + tile.head[i];
                        if (!pass) {
                            F top = NAME(load)(s), all = {};
                            for (long j = VL; j < WIDE; j += VL) top = NAME(larger)(top, NAME(load)(s + j));
                            float now = NAME(largest)(top);
                            if (now > most[n]) total[n] *= exp2f(most[n] - now), most[n] = now;
                            for (long j = 0; j < WIDE; j += VL) all += NAME(power)(NAME(load)(s + j) - most[n]);
                            total[n] += NAME(sum)(all);
                        } else {
                            float share = 1.f / (total[n] * (float)c->heads);
                            for (long j = 0; j < WIDE; j += VL) {
                                float *to = seen + row * WIDE + j;
                                NAME(store)(to, NAME(load)(to) + NAME(power)(NAME(load)(s + j) - most[n]) * share);
                            }
                        }
                    }
                }
            if (!pass) continue;
            for (long row = 0; row < stop - first; row++) {
                float *w = seen + row * WIDE;
                long own = c->positions[first + row] - key;
                if (own >= 0 && own < WIDE) w[own] = 0;
                for (long j = 0; j < WIDE; j += VL)
                    NAME(store)(received + key + j, NAME(load)(received + key + j) + NAME(load)(w + j));
                for (long n = 0; n < c->segments; n++) {
                    long a = c->bounds[n] - key, b = c->bounds[n + 1] - key;
                    if (a < 0) a = 0;
                    if (b > WIDE) b = WIDE;
                    if (a >= b) continue;
                    F all = {};
                    for (; a + VL <= b; a += VL) all += NAME(load)(w + a);
                    float sum = NAME(sum)(all);
                    for (; a < b; a++) sum += w[a];
                    mass[row * c->segments + n] += sum;
                }
            }
        }
}
static void NAME(mass_job)(const void *context, long job) {
    const attend_t *c = context;
    if (c->bfloat) NAME(mass_rows)(c, job, 1);
    else NAME(mass_rows)(c, job, 0);
}
/* `received` has a row of whole blocks for each 8 rows; they are added up into the first, in their order. */
EXPORT void NAME(mass)(const attend_t *c) {
    long jobs = (c->rows + MASS_ROWS - 1) / MASS_ROWS, width = NAME(blocks)(c) * BLOCK;
    run(NAME(pack_job), c, c->kv_heads * NAME(blocks)(c), c->threads);
    run(NAME(mass_job), c, jobs, c->threads);
    for (long job = 1; job < jobs; job++)
        for (long j = 0; j < width; j++) c->received[j] += c->received[job * width + j];
}

#undef F
#undef FU
#undef I
#undef H
#undef HU
#undef STEP
#undef AT
#undef PAIRED
#undef tile_t

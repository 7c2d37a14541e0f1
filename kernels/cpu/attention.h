/* Part of body.h: attention of scattered rows, attention of a few rows, and a whole layer for a few rows. */

/* -- products ------------------------------------------------------------------------------------------------------ */

/* c[6, STEP] (+)= a[6, n] · b[n, STEP]. The strides of the rows are lda, ldb and ldc. */
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
/* The same for pairs of bfloat16. */
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

#if defined(TILES)
/* The same with tiles: c[32, wide], a[32, n]. wide is a multiple of 32; a and b extend to a multiple of `deep`. */
INLINE void NAME(product_tiles)(const uint32_t *a, long lda, const uint32_t *b, long ldb, float *c, long ldc, long n,
                                long wide, long deep, int add) {
    __asm__ volatile("" ::: "memory"); /* gcc does not know that tiles are loaded from memory */
    for (long j = 0; j < wide; j += 32) {
        float *top = c + j, *low = top + 16 * ldc;
        if (add) {
            _tile_loadd(0, top, 4 * ldc);
            _tile_loadd(1, top + 16, 4 * ldc);
            _tile_loadd(2, low, 4 * ldc);
            _tile_loadd(3, low + 16, 4 * ldc);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (long k = 0; k < n; k += deep) {
            _tile_loadd(4, a + k, 4 * lda);
            _tile_loadd(6, b + k * ldb + j, 4 * ldb);
            _tile_loadd(7, b + k * ldb + j + 16, 4 * ldb);
            _tile_loadd(5, a + 16 * lda + k, 4 * lda);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, top, 4 * ldc);
        _tile_stored(1, top + 16, 4 * ldc);
        _tile_stored(2, low, 4 * ldc);
        _tile_stored(3, low + 16, 4 * ldc);
    }
}
#endif

/* -- attention ----------------------------------------------------------------------------------------------------- */

#if defined(PAIRS)
#define PAIRED(c) ((c)->bfloat)
#else
#define PAIRED(c) 0
#endif
#if defined(TILES)
#define MOST_ROWS 32
#define ROWS(c) ((c)->bfloat ? MOST_ROWS : TILE)
#else
#define MOST_ROWS TILE
#define ROWS(c) TILE
#endif

/* `open_tiles` and `close_tiles` set up the tiles of this thread before a job's products and release them after. torch
   sets up its own. */
INLINE long NAME(deep)(const attend_t *c) { /* pairs of a tile: the largest power of two that divides the head, at most 16 */
    long pairs = c->dim / 2, power = pairs & -pairs;
    return power < 16 ? power : 16;
}
INLINE void NAME(open_tiles)(const attend_t *c) {
#if defined(TILES)
    uint8_t deep = (uint8_t)NAME(deep)(c);
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {
        .palette = 1,
        .bytes = {64, 64, 64, 64, (uint16_t)(4 * deep), (uint16_t)(4 * deep), 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, deep, deep},
    };
    __asm__ volatile("" ::"r"(&shapes) : "memory"); /* gcc knows only that the first 8 bytes are read */
    if (c->bfloat) _tile_loadconfig(&shapes);
#endif
}
INLINE void NAME(close_tiles)(const attend_t *c) {
#if defined(TILES)
    if (c->bfloat) _tile_release();
#endif
}

/* out[rows, wide] (+)= a[rows, n] · b[n, wide] with row strides a_row, b_row and out_row. n counts pairs if c is PAIRED. */
INLINE void NAME(products)(const attend_t *c, const void *a, long a_row, const uint32_t *b, long b_row, float *out,
                           long out_row, long rows, long n, long wide, int add) {
#if defined(TILES)
    if (c->bfloat) {
        NAME(product_tiles)(a, a_row, b, b_row, out, out_row, n, wide, NAME(deep)(c), add);
        return;
    }
#endif
    for (long i = 0; i < rows; i += 6)
        for (long j = 0; j < wide; j += STEP) {
            float *to = out + i * out_row + j;
#if defined(PAIRS)
            if (c->bfloat) {
                NAME(product2)((const uint32_t *)a + i * a_row, a_row, b + j, b_row, to, out_row, n, add);
                continue;
            }
#endif
            NAME(product)((const float *)a + i * a_row, a_row, (const float *)b + j, b_row, to, out_row, n, add);
        }
}

/* Layout of `packed`: for each key/value head keys [blocks][dim][64], then for each head values [blocks · 64][padded dim].
   In pairs, dim of the keys and the tokens of the values are half as many. */
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

/* Return the first key that this row sees. Blocks before the first row's are not packed. */
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

/* Folded rows of one key/value head. The number of a folded row is row · group + number of the query in its group. */
typedef struct {
    float q[MOST_ROWS * MOST_DIM] __attribute__((aligned(64)));
    float s[MOST_ROWS * WIDE] __attribute__((aligned(64)));
    long row[MOST_ROWS]; /* row of each folded row */
    long head[MOST_ROWS], count, first_row, last_row;
} NAME(tile_t);
#define tile_t NAME(tile_t)

INLINE void NAME(take)(const attend_t *c, tile_t *tile, long kv_head, long first, long stop, long bf) {
    long size = bf ? 2 : 4, group = c->heads / c->kv_heads;
    tile->count = stop - first;
    tile->first_row = first / group;
    tile->last_row = (stop - 1) / group;
    memset(tile->q, 0, (size_t)(MOST_ROWS * c->dim) * (PAIRED(c) ? 2 : 4));
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

/* Turn products with keys into scores in units of log 2: scale, cap, and hide the keys that a row does not see. */
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

/* Compute the scores of a tile's rows with WIDE keys from `key` on. */
INLINE void NAME(scores)(const attend_t *c, tile_t *tile, long kv_head, long key) {
    const uint32_t *packed = NAME(keys_of)(c, kv_head) + key / BLOCK * NAME(key_words)(c);
    long n = PAIRED(c) ? c->dim / 2 : c->dim;
    for (long b = 0; b < WIDE / BLOCK; b++, packed += NAME(key_words)(c))
        NAME(products)(c, tile->q, n, packed, BLOCK, tile->s + b * BLOCK, WIDE, tile->count, n, BLOCK, 0);
    NAME(finish)(c, tile, tile->s, key, WIDE);
}

INLINE void NAME(attend_tile)(const attend_t *c, long job, long bf) {
    long size = bf ? 2 : 4, group = c->heads / c->kv_heads, folded = c->rows * group, step = ROWS(c);
    long kv_head = job % c->kv_heads, number = (folded - 1) / step - job / c->kv_heads; /* the longest first */
    long first = number * step, stop = first + step < folded ? first + step : folded, padded = NAME(padded)(c);
    tile_t tile;
    float o[MOST_ROWS * MOST_DIM] __attribute__((aligned(64)));
    half_t p[MOST_ROWS * WIDE] __attribute__((aligned(64)));
    float most[MOST_ROWS], total[MOST_ROWS];
    NAME(take)(c, &tile, kv_head, first, stop, bf);
    memset(o, 0, (size_t)(MOST_ROWS * padded) * 4);
    memset(p, 0, sizeof p);
    for (long i = 0; i < MOST_ROWS; i++) {
        int sinks = c->sinks && i < tile.count;
        most[i] = sinks ? c->sinks[tile.head[i]] * 1.44269504f : -1e30f;
        total[i] = sinks ? 1.f : 0.f;
    }
    for (long i = tile.count * WIDE; i < MOST_ROWS * WIDE; i++) tile.s[i] = 0;
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
        if (PAIRED(c)) NAME(products)(c, p, WIDE / 2, v, padded, o, padded, tile.count, (left + 1) / 2, padded, 1);
        else NAME(products)(c, tile.s, WIDE, v, padded, o, padded, tile.count, left, padded, 1);
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
    NAME(open_tiles)(c);
    if (c->bfloat) NAME(attend_tile)(c, job, 1);
    else NAME(attend_tile)(c, job, 0);
    NAME(close_tiles)(c);
}

/* Attend from a few rows, such as a decode step's. Keys and values are read without packing, in parts of fixed length.
   For each part and row, `packed` receives the largest score, the sum, and [dim] weighted values. */
INLINE void NAME(few_part)(const attend_t *c, long job, long bf) {
    long size = bf ? 2 : 4, dim = c->dim, folded = c->rows * (c->heads / c->kv_heads);
    long kv_head = job % c->kv_heads, part = job / c->kv_heads, key = part * PART;
    long stop = key + PART < c->keys ? key + PART : c->keys;
    float *out = (float *)c->packed + job * folded * (dim + 2), scores[FEW * PART] __attribute__((aligned(64)));
    tile_t tile;
    attend_t wide = *c;
    wide.bfloat = 0; /* queries are float32 below */
    tile.count = folded, tile.first_row = 0, tile.last_row = c->rows - 1;
    long group = c->heads / c->kv_heads;
    for (long i = 0; i < folded; i++) {
        const void *q = AT(c->q, i / group * c->q_row + (kv_head * group + i % group) * c->q_head);
        tile.row[i] = i / group;
        for (long d = 0; d < dim; d++) tile.q[i * dim + d] = NAME(get1)(q, d, bf);
    }
    for (long n = key; n < stop; n++) {
        const void *k = AT(c->k, n * c->k_row + kv_head * c->k_head);
        const void *next = AT(k, AHEAD * c->k_row), *v = AT(c->v, n * c->v_row + kv_head * c->v_head);
        for (long d = 0; d < dim; d += 64 / size) { /* values are read after the keys */
            __builtin_prefetch(AT(next, d));
            __builtin_prefetch(AT(v, d));
        }
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
            float sink = c->sinks ? c->sinks[head * group + i % group] * 1.44269504f : -1e30f;
            float most = sink, total = 0, sum[MOST_DIM] = {};
            for (long part = 0; part < parts; part++) {
                const float *o = (const float *)c->packed + ((part * c->kv_heads + head) * folded + i) * (dim + 2);
                most = o[0] > most ? o[0] : most;
            }
            if (c->sinks) total = exp2f(sink - most);
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
    run(NAME(attend_job), c, c->kv_heads * ((folded + ROWS(c) - 1) / ROWS(c)), c->threads);
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
    for (long row = 0; row < rows; row++) { /* after all rows are written: several rows may belong to one answer */
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

/* Part of body.h: norms, gates, products of few rows. */

/* -- parts of layers ----------------------------------------------------------------------------------------------- */

/* Round where the models' own modules round: after the sum, after the division, after the product. */
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

/* Return the dot product of two vectors. `w` is read as one stream. */
INLINE float NAME(dot)(const void *w, const void *x, long width, long bf) {
    long k = 0;
    F s[4] = {};
#if defined(PAIRS)
    if (bf) {
        const half_t *a = w, *b = x;
        __m512 t[4] = {};
        for (; k + 128 <= width; k += 128)
#pragma GCC unroll 4
            for (long j = 0; j < 4; j++)
                t[j] = _mm512_dpbf16_ps(t[j], (__m512bh)_mm512_loadu_si512(a + k + 32 * j),
                                        (__m512bh)_mm512_loadu_si512(b + k + 32 * j));
        for (; k + 32 <= width; k += 32)
            t[0] = _mm512_dpbf16_ps(t[0], (__m512bh)_mm512_loadu_si512(a + k), (__m512bh)_mm512_loadu_si512(b + k));
        for (long j = 0; j < 4; j++) s[j] = (F)t[j];
    }
#endif
    for (; k + 4 * VL <= width; k += 4 * VL)
#pragma GCC unroll 4
        for (long j = 0; j < 4; j++) s[j] += NAME(get)(w, k + j * VL, bf) * NAME(get)(x, k + j * VL, bf);
    float found = NAME(sum)((s[0] + s[1]) + (s[2] + s[3]));
    for (; k < width; k++) found += NAME(get1)(w, k, bf) * NAME(get1)(x, k, bf);
    return found;
}

/* Compute the dot products of one vector with four. */
INLINE void NAME(dots)(const void *w, const void *const *x, float *found, long width, long bf) {
    long k = 0;
    F s[4] = {};
#if defined(PAIRS)
    if (bf) {
        __m512 t[4] = {};
        for (; k + 32 <= width; k += 32) {
            __m512bh y = (__m512bh)_mm512_loadu_si512((const half_t *)w + k);
#pragma GCC unroll 4
            for (long j = 0; j < 4; j++)
                t[j] = _mm512_dpbf16_ps(t[j], (__m512bh)_mm512_loadu_si512((const half_t *)x[j] + k), y);
        }
        for (long j = 0; j < 4; j++) s[j] = (F)t[j];
    }
#endif
    for (; k + VL <= width; k += VL) {
        F y = NAME(get)(w, k, bf);
#pragma GCC unroll 4
        for (long j = 0; j < 4; j++) s[j] += NAME(get)(x[j], k, bf) * y;
    }
    for (long j = 0; j < 4; j++) found[j] = NAME(sum)(s[j]);
    for (; k < width; k++)
        for (long j = 0; j < 4; j++) found[j] += NAME(get1)(w, k, bf) * NAME(get1)(x[j], k, bf);
}

/* Compute 32 outputs for a few rows. The weights are read once, at memory speed. */
INLINE void NAME(linear_outs)(const linear_t *c, long job, long bf) {
    long size = bf ? 2 : 4, width = c->width, stop = (job + 1) * 32 < c->outs ? (job + 1) * 32 : c->outs;
    for (long n = job * 32; n < stop; n++) {
        const void *w = AT(c->weight, n * width);
        float bias = c->bias ? NAME(get1)(c->bias, n, bf) : 0.f;
        for (long row = 0, count; row < c->rows; row += count) {
            const void *x[4];
            float found[4];
            for (long j = 0; j < 4; j++) x[j] = AT(c->x, (row + j) * width);
            count = row + 4 <= c->rows ? 4 : 1;
            if (count == 4) NAME(dots)(w, x, found, width, bf);
            else found[0] = NAME(dot)(w, x[0], width, bf);
            for (long j = 0; j < count; j++) NAME(put1)(c->out, (row + j) * c->outs + n, found[j] + bias, bf);
        }
    }
}
static void NAME(linear_job)(const void *context, long job) {
    const linear_t *c = context;
    if (c->bfloat) NAME(linear_outs)(c, job, 1);
    else NAME(linear_outs)(c, job, 0);
}
EXPORT void NAME(linear)(const linear_t *c, long threads) { run(NAME(linear_job), c, (c->outs + 31) / 32, threads); }

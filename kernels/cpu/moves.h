/* Part of body.h: rotation, placing, drift correction. */

/* -- rotation ------------------------------------------------------------------------------------------------------ */

/* Rotate one head by the angles of one position. `shift` (float, or 0) is added first. */
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

/* Write raw keys and values of adjacent tokens into the merged buffer, with keys rotated. */
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

/* Compute the mean change of a chunk's recomputed tokens, times the strength. Changes of keys (even jobs) are rotated back
   to position 0. */
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
                F ll = cl * cl + sl * sl, lh = ch * ch + sh * sh; /* 1, except for rope scalings that stretch */
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

/* Move the keys and values of a range of stale tokens by its chunk's shift. */
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

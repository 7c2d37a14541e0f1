/* Part of body.h: attention mass. */

/* -- attention mass ------------------------------------------------------------------------------------------------ */

/* Compute the weights of some rows, averaged over the heads: to each segment, and to each key from all these rows. The
   first pass computes the largest score and the sum of each row, the second pass the weights. */
INLINE void NAME(mass_rows)(const attend_t *c, long job, long bf) {
    long group = c->heads / c->kv_heads, first = job * MASS_ROWS;
    long stop = first + MASS_ROWS < c->rows ? first + MASS_ROWS : c->rows, end = c->positions[stop - 1] + 1;
    float *received = c->received + job * NAME(blocks)(c) * BLOCK, *mass = c->mass + first * c->segments;
    float seen[MASS_ROWS * WIDE] __attribute__((aligned(64)));
    tile_t tile;
    memset(received, 0, (size_t)(NAME(blocks)(c) * BLOCK) * 4);
    memset(mass, 0, (size_t)((stop - first) * c->segments) * 4);
    float most[MASS_ROWS * c->heads], total[MASS_ROWS * c->heads];
    for (long n = 0; n < MASS_ROWS * c->heads; n++) {
        most[n] = c->sinks ? c->sinks[n % c->heads] * 1.44269504f : -1e30f;
        total[n] = c->sinks ? 1.f : 0.f;
    }
    for (int pass = 0; pass < 2; pass++)
        for (long key = NAME(first_seen)(c, first) / WIDE * WIDE; key < end; key += WIDE) {
            if (pass) memset(seen, 0, sizeof seen);
            for (long kv_head = 0; kv_head < c->kv_heads; kv_head++)
                for (long f = first * group; f < stop * group; f += ROWS(c)) {
                    long last = f + ROWS(c) < stop * group ? f + ROWS(c) : stop * group;
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
    NAME(open_tiles)(c);
    if (c->bfloat) NAME(mass_rows)(c, job, 1);
    else NAME(mass_rows)(c, job, 0);
    NAME(close_tiles)(c);
}
/* `received` has a row of whole blocks for each job; they are added up into the first one, in order. */
EXPORT void NAME(mass)(const attend_t *c) {
    long jobs = (c->rows + MASS_ROWS - 1) / MASS_ROWS, width = NAME(blocks)(c) * BLOCK;
    run(NAME(pack_job), c, c->kv_heads * NAME(blocks)(c), c->threads);
    run(NAME(mass_job), c, jobs, c->threads);
    for (long job = 1; job < jobs; job++)
        for (long j = 0; j < width; j++) c->received[j] += c->received[job * width + j];
}

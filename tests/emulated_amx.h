/* AMX in plain C, for `gcc -include`: tiles after Intel's manual, of each thread, with what the CPU and the system say.
   What faults on a CPU aborts here. EMULATED_AMX=refused in the environment: the system does not permit tiles. */

#define _GNU_SOURCE 1
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct { long rows, bytes; uint8_t data[16][64]; } emulated_tile_t;
static __thread struct { int configured; emulated_tile_t tiles[8]; } emulated;
static int emulated_permission;
long emulated_configured; /* threads that have tiles now */
long emulated_products;

static void emulated_need(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "AMX: %s\n", what);
    abort();
}

static long emulated_syscall(long number, long code, long feature) {
    emulated_need(number == SYS_arch_prctl && code == 0x1023 && feature == 18, "not ARCH_REQ_XCOMP_PERM for tiles");
    const char *setting = getenv("EMULATED_AMX");
    if (setting && !strcmp(setting, "refused")) return -1;
    emulated_permission = 1;
    return 0;
}

static void emulated_loadconfig(const void *config) {
    const uint8_t *bytes = config;
    emulated_need(emulated_permission, "used without permission");
    emulated_need(bytes[0] == 1 && bytes[1] == 0, "another palette or start row");
    for (int i = 2; i < 64; i++) emulated_need(bytes[i] == 0 || (i >= 16 && i < 32) || (i >= 48 && i < 56), "reserved bytes");
    if (!emulated.configured) __atomic_add_fetch(&emulated_configured, 1, __ATOMIC_RELAXED);
    memset(&emulated, 0, sizeof emulated);
    emulated.configured = 1;
    for (int i = 0; i < 8; i++) {
        emulated_tile_t *tile = emulated.tiles + i;
        tile->bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8, tile->rows = bytes[48 + i];
        emulated_need(tile->bytes <= 64 && tile->rows <= 16 && !tile->bytes == !tile->rows, "the shape of a tile");
    }
}

static void emulated_release(void) {
    if (emulated.configured) __atomic_sub_fetch(&emulated_configured, 1, __ATOMIC_RELAXED);
    memset(&emulated, 0, sizeof emulated);
}

static emulated_tile_t *emulated_tile(int number) {
    emulated_need(emulated.configured, "a tile used before it is configured or after it is released");
    emulated_need(number >= 0 && number < 8 && emulated.tiles[number].rows, "no such tile");
    return emulated.tiles + number;
}

static void emulated_zero(int number) { memset(emulated_tile(number)->data, 0, sizeof emulated.tiles[0].data); }

static void emulated_loadd(int number, const void *base, long stride) {
    emulated_tile_t *tile = emulated_tile(number);
    emulated_zero(number);
    for (long i = 0; i < tile->rows; i++) memcpy(tile->data[i], (const char *)base + i * stride, (size_t)tile->bytes);
}

static void emulated_stored(int number, void *base, long stride) {
    emulated_tile_t *tile = emulated_tile(number);
    for (long i = 0; i < tile->rows; i++) memcpy((char *)base + i * stride, tile->data[i], (size_t)tile->bytes);
}

static float emulated_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.f, x) : x; } /* denormals */

static float emulated_half(const uint8_t *pair, int second) {
    uint32_t bits = (uint32_t)(pair[2 * second] | pair[2 * second + 1] << 8) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return emulated_flushed(x);
}

/* Sums of the first and of the second products of each pair, fused and rounded to nearest even, are added at the end. */
static void emulated_dpbf16ps(int to, int left, int right) {
    emulated_tile_t *c = emulated_tile(to), *a = emulated_tile(left), *b = emulated_tile(right);
    emulated_need(to != left && to != right && left != right, "a product of a tile with itself");
    emulated_need(c->rows == a->rows && c->bytes == b->bytes && a->bytes == 4 * b->rows, "shapes that do not fit");
    emulated_need(c->bytes % 4 == 0, "a row of broken numbers");
    __atomic_add_fetch(&emulated_products, 1, __ATOMIC_RELAXED);
    for (long m = 0; m < c->rows; m++)
        for (long n = 0; n < c->bytes / 4; n++) {
            float sums[2] = {0, 0}, x;
            for (long k = 0; k < b->rows; k++)
                for (int part = 0; part < 2; part++)
                    sums[part] = emulated_flushed(fmaf(emulated_half(a->data[m] + 4 * k, part),
                                                       emulated_half(b->data[k] + 4 * n, part), sums[part]));
            memcpy(&x, c->data[m] + 4 * n, 4);
            x = emulated_flushed(emulated_flushed(x) + emulated_flushed(sums[0] + sums[1]));
            memcpy(c->data[m] + 4 * n, &x, 4);
        }
    for (long m = c->rows; m < 16; m++) memset(c->data[m], 0, 64);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define __get_cpuid_count(leaf, sub, a, b, c, d) ((void)(a), (void)(b), (void)(c), *(d) = 1u << 22 | 1u << 24, 1)
#define syscall(number, code, feature) emulated_syscall(number, code, feature)
#endif

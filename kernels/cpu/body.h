/* The kernels for one set of instructions. ISA is its name, VL the number of floats of a vector, NV the number of vectors
   of a step of products. Products of bfloat16 are computed in pairs with PAIRS, also in tiles with TILES, and else in
   float32. */

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

/* Return 2^x with a relative error of 1e-7; 0 below 2^-125. */
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

#include "moves.h"
#include "layers.h"
#include "attention.h"
#include "mass.h"

#undef F
#undef FU
#undef I
#undef H
#undef HU
#undef STEP
#undef AT
#undef PAIRED
#undef MOST_ROWS
#undef ROWS
#undef tile_t

/* Vectors of W floats on any CPU, and e to the x.  attention.c, recurrent.c and draw.c are written with them; they fix the order
   of their sums. */

#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define W 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define W 8
#else
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#define W 4
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef float Loose __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * W))); /* unsigned, so that sums may wrap */
#define INLINE static inline __attribute__((always_inline))

INLINE V load(const float *x) { return *(const Loose *)x; }
INLINE void store(float *x, V v) { *(Loose *)x = v; }
INLINE V all(float x) { return x - (V){0}; }
INLINE int64_t whole(int64_t size) { return (size + W - 1) / W * W; }

/* a b + c, rounded once where the CPU can.  Of a sum of two products, the compiler would choose the one to round. */
#if defined(__AVX512F__)
INLINE V fused(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
INLINE V fused(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__ARM_NEON)
INLINE V fused(V a, V b, V c) { return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
INLINE V fused(V a, V b, V c) { return a * b + c; }
#endif

/* e to the x, for x of at most 0; 0 if x is below -86.  NaN stays NaN. */
INLINE V exponential(V x) {
    const V round = all(12582912.0f); /* a float of this size has no bits below its units */
    V whole = x * 1.44269504f + round;
    Bits power = ((Bits)whole << 23) + (127 << 23), small = (Bits)(x < -86.0f);
    whole -= round;
    V rest = x - whole * 0.693145752f - whole * 1.42860677e-6f, sum = all(1 / 5040.0f);
    sum = sum * rest + 1 / 720.0f;
    sum = sum * rest + 1 / 120.0f;
    sum = sum * rest + 1 / 24.0f;
    sum = sum * rest + 1 / 6.0f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1;
    sum = sum * rest + 1;
    return (V)((Bits)(sum * (V)power) & ~small);
}

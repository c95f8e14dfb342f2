/* Operations on vectors of V numbers, for AVX-512, AVX2 and NEON with dot products; without these V is not defined.
   products.c and blocks.c are written with them.  REGISTERS: vectors that a CPU holds.
   load_powers: 2^(byte - 127).  look_up: the bytes, 16, at places given as bytes. */

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EACH(index, count) _Pragma("GCC unroll 24") for (int index = 0; index < (count); index++)

/* Fetches ``bytes`` bytes from an address on into the second cache; there may be no such address. */
#define FETCH(from, bytes) \
    _Pragma("GCC unroll 24") for (int line = 0; line < (bytes); line += 64) __builtin_prefetch((from) + line, 0, 2)
/* Distance of what is fetched while panels are multiplied: as far as the next ones, unless these are large.  Few rows
   wait for their weights, and CPUs foresee only reads of one page of memory. */
#define FETCHED_AT_ONCE (256 << 10)
#define ahead_of(panels_bytes) ((panels_bytes) <= FETCHED_AT_ONCE ? (panels_bytes) : 4096)

/* Loops over a group profit from -O3. */
#if defined(__GNUC__) && !defined(__clang__)
#define OF_VECTORS __attribute__((optimize("O3")))
#else
#define OF_VECTORS
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
#define V 16
#define REGISTERS 32
typedef __m512 Floats;
typedef __m512i Integers;
#define load(from) _mm512_loadu_ps(from)
#define load_bytes(from) _mm512_loadu_si512(from)
#define load_halves(from) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from)))
#define load_scales(from) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from))), 16))
#define load_sums(from) _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(from)))
#define lower_float(pair) _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16))
#define upper_float(pair) _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xffff0000)))
#define store(to, what) _mm512_storeu_ps(to, what)
#define all(x) _mm512_set1_ps(x)
#define all_integers(x) _mm512_set1_epi32(x)
#define fused(a, b, c) _mm512_fmadd_ps(a, b, c)
#define plus(a, b) _mm512_add_ps(a, b)
#define times(a, b) _mm512_mul_ps(a, b)
#define float_of(a) _mm512_cvtepi32_ps(a)
#define integers_as(a) _mm512_castps_si512(a)
#define load_powers(from) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from))), 23))
#define look_up(bytes, a) \
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(bytes))), a)
#define load_small(from) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from))))
#define both(a, b) _mm512_and_si512(a, b)
#define either(a, b) _mm512_or_si512(a, b)
#define left(a, bits) _mm512_slli_epi32(a, bits)
#define right(a, bits) _mm512_srli_epi32(a, bits)
#define times_integers(a, b) _mm512_mullo_epi32(a, b)
#define plus_integers(a, b) _mm512_add_epi32(a, b)
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define V 8
#define REGISTERS 16
typedef __m256 Floats;
typedef __m256i Integers;
#define load(from) _mm256_loadu_ps(from)
#define load_bytes(from) _mm256_loadu_si256((const __m256i *)(from))
#define load_halves(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define load_scales(from) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from))), 16))
#define load_sums(from) _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define lower_float(pair) _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16))
#define upper_float(pair) _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(0xffff0000)))
#define store(to, what) _mm256_storeu_ps(to, what)
#define all(x) _mm256_set1_ps(x)
#define all_integers(x) _mm256_set1_epi32(x)
#define fused(a, b, c) _mm256_fmadd_ps(a, b, c)
#define plus(a, b) _mm256_add_ps(a, b)
#define times(a, b) _mm256_mul_ps(a, b)
#define float_of(a) _mm256_cvtepi32_ps(a)
#define integers_as(a) _mm256_castps_si256(a)
#define load_powers(from) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from))), 23))
#define look_up(bytes, a) \
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(bytes))), a)
#define load_small(from) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from))))
#define both(a, b) _mm256_and_si256(a, b)
#define either(a, b) _mm256_or_si256(a, b)
#define left(a, bits) _mm256_slli_epi32(a, bits)
#define right(a, bits) _mm256_srli_epi32(a, bits)
#define times_integers(a, b) _mm256_mullo_epi32(a, b)
#define plus_integers(a, b) _mm256_add_epi32(a, b)
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define V 4
#define REGISTERS 32
typedef float32x4_t Floats;
typedef int32x4_t Integers;
#define load(from) vld1q_f32(from)
#define load_bytes(from) vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)(from)))
#define load_halves(from) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)))
#define load_scales(from) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)(from)), 16))
#define load_sums(from) vmovl_s16(vld1_s16((const int16_t *)(from)))
#define lower_float(pair) vreinterpretq_f32_s32((pair) << 16)
#define upper_float(pair) vreinterpretq_f32_s32((pair) & (int32_t)0xffff0000)
#define store(to, what) vst1q_f32(to, what)
#define all(x) vdupq_n_f32(x)
#define all_integers(x) vdupq_n_s32(x)
#define fused(a, b, c) vfmaq_f32(c, a, b)
#define plus(a, b) vaddq_f32(a, b)
#define times(a, b) vmulq_f32(a, b)
#define float_of(a) vcvtq_f32_s32(a)
#define integers_as(a) vreinterpretq_s32_f32(a)
INLINE Floats load_small(const char *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
INLINE Floats load_powers(const char *from) {
    uint32_t four;
    memcpy(&four, from, sizeof four);
    uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return vreinterpretq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))) << 23);
}
#define look_up(bytes, a) vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(bytes), vreinterpretq_u8_s32(a)))
#define both(a, b) vandq_s32(a, b)
#define either(a, b) vorrq_s32(a, b)
#define left(a, bits) ((a) << (bits))
#define right(a, bits) vreinterpretq_s32_u32(vreinterpretq_u32_s32(a) >> (bits))
#define times_integers(a, b) vmulq_s32(a, b)
#define plus_integers(a, b) vaddq_s32(a, b)
#endif

/* Adds the products of unsigned bytes of x and signed ones of w, by fours.  WIDE_SUMS: any bytes are right; else those
   of x must be below 128, or w must have 7 bits and x be given to dot_bytes. */
#if defined(__AVX512VNNI__)
#define WIDE_SUMS 1
#define dot(sum, x, w) _mm512_dpbusd_epi32(sum, x, w)
#elif defined(V) && V == 8 && defined(__AVXVNNI__)
#define WIDE_SUMS 1
#define dot(sum, x, w) _mm256_dpbusd_avx_epi32(sum, x, w)
#elif defined(V) && V == 16
#define WIDE_SUMS 0
#define dot(sum, x, w) \
    _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(x, w), _mm512_set1_epi16(1)))
#elif defined(V) && V == 8
#define WIDE_SUMS 0
#define dot(sum, x, w) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)))
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define WIDE_SUMS 1
#define dot(sum, x, w) vusdotq_s32(sum, vreinterpretq_u8_s32(x), vreinterpretq_s8_s32(w))
#elif defined(V)
#define WIDE_SUMS 0
#define signed_dot(sum, x, w) vdotq_s32(sum, vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(w))
#define dot(sum, x, w) signed_dot(sum, x, w)
/* x is 64 + 64 and a signed byte. */
#define dot_bytes(sum, x, w) \
    signed_dot(signed_dot(signed_dot(sum, (x) ^ (int32_t)0x80808080, w), all_integers(0x40404040), w), \
               all_integers(0x40404040), w)
#endif
#ifndef dot_bytes
#define dot_bytes(sum, x, w) dot(sum, x, w)
#endif

/* Adds the products of two neighbours each, which are the halves of a float's bits and are bfloat16.
   PAIR_PRODUCTS: whether that is one instruction; it takes what is below the smallest normal number as 0. */
#if defined(__AVX512BF16__)
#define PAIR_PRODUCTS 1
#define dot_pairs(sum, x, w) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(w))
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAIR_PRODUCTS 1
#define dot_pairs(sum, x, w) vbfdotq_f32(sum, vreinterpretq_bf16_f32(x), vreinterpretq_bf16_f32(w))
#elif defined(V)
#define PAIR_PRODUCTS 0
#define dot_pairs(sum, x, w)                                            \
    fused(upper_float(integers_as(x)), upper_float(integers_as(w)),     \
          fused(lower_float(integers_as(x)), lower_float(integers_as(w)), sum))
#endif

#ifdef V
INLINE float float_of_half(uint16_t half) {
#if V == 4
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return value;
#else
    return _cvtsh_ss(half);
#endif
}

INLINE uint16_t half_of(float x) {
#if V == 4
    __fp16 value = x;
    uint16_t half;
    memcpy(&half, &value, sizeof half);
    return half;
#else
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#endif
}

/* The nearest bfloat16. */
INLINE uint16_t upper_half_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}
#endif

/* Operations on vectors of V numbers, for AVX-512 and for AVX2; without either V is not defined.
   products.c and blocks.c are written with them. */

#define INLINE static inline __attribute__((always_inline))
#define EACH(index, count) _Pragma("GCC unroll 24") for (int index = 0; index < (count); index++)

/* Loops over a group profit from -O3. */
#if defined(__GNUC__) && !defined(__clang__)
#define OF_VECTORS __attribute__((optimize("O3")))
#else
#define OF_VECTORS
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
#define V 16
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
#define load_small(from) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from))))
#define both(a, b) _mm256_and_si256(a, b)
#define either(a, b) _mm256_or_si256(a, b)
#define left(a, bits) _mm256_slli_epi32(a, bits)
#define right(a, bits) _mm256_srli_epi32(a, bits)
#define times_integers(a, b) _mm256_mullo_epi32(a, b)
#define plus_integers(a, b) _mm256_add_epi32(a, b)
#endif

/* Adds the products of unsigned bytes of x and signed ones of w, by fours.  WIDE_SUMS: any bytes are right; else a sum
   of two neighbours' products must fit 16 bits. */
#ifdef __AVX512VNNI__
#define WIDE_SUMS 1
#define dot(sum, x, w) _mm512_dpbusd_epi32(sum, x, w)
#elif defined(V) && V == 8 && defined(__AVXVNNI__)
#define WIDE_SUMS 1
#define dot(sum, x, w) _mm256_dpbusd_avx_epi32(sum, x, w)
#elif defined(V) && V == 16
#define WIDE_SUMS 0
#define dot(sum, x, w) \
    _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(x, w), _mm512_set1_epi16(1)))
#elif defined(V)
#define WIDE_SUMS 0
#define dot(sum, x, w) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)))
#endif

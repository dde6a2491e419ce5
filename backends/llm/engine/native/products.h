// Products of a few rows in 8 bits with a tile of weights in 8 bits, in the instructions that the CPU has. Sums of
// integers, exact in any order: all CPUs give the same to the bit.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

constexpr int64_t block = 64;  // inputs under one scale
constexpr int64_t width = 32;  // outputs of a tile

// What a product reads. weight: [inputs / 4, 32, 4], 128 added to each; steps: [inputs / 64, 32] bfloat16, the weights'
// scales; values: [rows, inputs]; scales, offsets: [rows, inputs / 64], the rows' scales, and what weights that are 128
// too large add to a block's sum.
struct Factors {
    const uint8_t* weight;
    const uint16_t* steps;
    const int8_t* values;
    const float* scales;
    const int32_t* offsets;
    int64_t inputs;

    int32_t four_values(int64_t row, int64_t block_number, int64_t k) const {
        int32_t four;
        std::memcpy(&four, values + row * inputs + block_number * block + 4 * k, 4);
        return four;
    }
};

// multiply<R>(factors, sums): the products of R rows, at most `most`, for the 32 outputs.

#if defined(__AVX512VNNI__)

#define HAS_INT8_PRODUCTS
constexpr int most = 6;  // 2 * 6 sums of integers and as many of floats fill the registers

// 16 floats whose upper halves these are.
inline __m512 from_bfloat16(const uint16_t* values) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

template <int R>
inline void multiply(const Factors& f, float (*sums)[width]) {
    const int64_t blocks = f.inputs / block;
    const uint8_t* weight = f.weight;
    __m512 low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
        __m512i first[R], second[R];
        for (int r = 0; r < R; ++r) first[r] = second[r] = _mm512_set1_epi32(-f.offsets[r * blocks + b]);
        for (int64_t k = 0; k < block / 4; ++k, weight += 4 * width) {
            _mm_prefetch(reinterpret_cast<const char*>(weight + 2048), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(weight + 2112), _MM_HINT_T0);
            const __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(weight + 64);
            for (int r = 0; r < R; ++r) {
                const __m512i x = _mm512_set1_epi32(f.four_values(r, b, k));
                first[r] = _mm512_dpbusd_epi32(first[r], w0, x);
                second[r] = _mm512_dpbusd_epi32(second[r], w1, x);
            }
        }
        const __m512 step0 = from_bfloat16(f.steps + b * width), step1 = from_bfloat16(f.steps + b * width + 16);
        for (int r = 0; r < R; ++r) {
            const __m512 scale = _mm512_set1_ps(f.scales[r * blocks + b]);
            low[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(first[r]), _mm512_mul_ps(scale, step0), low[r]);
            high[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(second[r]), _mm512_mul_ps(scale, step1), high[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(sums[r], low[r]);
        _mm512_storeu_ps(sums[r] + 16, high[r]);
    }
}

#elif defined(__AVX2__) && defined(__FMA__)

#define HAS_INT8_PRODUCTS
constexpr int most = 4;  // 2 * 4 sums of integers, and what a product needs beside them, fill the registers

// 8 floats whose upper halves these are.
inline __m256 from_bfloat16(const uint16_t* values) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Weights of 8 outputs: their sizes, and their signs, which an instruction moves over to the row's values. So no pair of
// products exceeds 16 bits, in which they are added first.
struct Signed {
    __m256i value, size;

    explicit Signed(const uint8_t* weight) {
        const __m256i with_offset = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight));
        value = _mm256_xor_si256(with_offset, _mm256_set1_epi8(-128));
        size = _mm256_abs_epi8(value);
    }
    __m256i add_product(__m256i sum, __m256i x) const {
        const __m256i with_sign = _mm256_sign_epi8(x, value);
#ifdef __AVXVNNI__
        return _mm256_dpbusd_avx_epi32(sum, size, with_sign);
#else
        const __m256i pairs = _mm256_maddubs_epi16(size, with_sign);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }
};

// Of 16 of the outputs, those from `start`.
template <int R>
inline void multiply_half(const Factors& f, int64_t start, float (*sums)[width]) {
    const int64_t blocks = f.inputs / block;
    const uint8_t* weight = f.weight + 4 * start;
    __m256 low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
        __m256i first[R], second[R];
        for (int r = 0; r < R; ++r) first[r] = second[r] = _mm256_setzero_si256();
        for (int64_t k = 0; k < block / 4; ++k, weight += 4 * width) {
            const Signed w0(weight), w1(weight + 32);
            for (int r = 0; r < R; ++r) {
                const __m256i x = _mm256_set1_epi32(f.four_values(r, b, k));
                first[r] = w0.add_product(first[r], x);
                second[r] = w1.add_product(second[r], x);
            }
        }
        const uint16_t* steps = f.steps + b * width + start;
        const __m256 step0 = from_bfloat16(steps), step1 = from_bfloat16(steps + 8);
        for (int r = 0; r < R; ++r) {
            const __m256 scale = _mm256_set1_ps(f.scales[r * blocks + b]);
            low[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(first[r]), _mm256_mul_ps(scale, step0), low[r]);
            high[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second[r]), _mm256_mul_ps(scale, step1), high[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        _mm256_storeu_ps(sums[r] + start, low[r]);
        _mm256_storeu_ps(sums[r] + start + 8, high[r]);
    }
}

template <int R>
inline void multiply(const Factors& f, float (*sums)[width]) {
    for (int64_t start = 0; start < width; start += width / 2) multiply_half<R>(f, start, sums);
}

#endif

#ifdef HAS_INT8_PRODUCTS

template <int R = most>
inline void multiply(int rows, const Factors& f, float (*sums)[width]) {
    if (rows == R) return multiply<R>(f, sums);
    if constexpr (R > 1) multiply<R - 1>(rows, f, sums);
}

#endif

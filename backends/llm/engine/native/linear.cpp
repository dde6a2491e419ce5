// Products of float rows with a weight matrix in 8 bits, for x86 CPUs with AVX512-VNNI, and what stands around them in
// a decoder: the norm before, the sum or the gate after.
//
// Rows and weights are cut into blocks of 64 inputs, each in 8 bits with a scale of its own, so that one large value
// costs only its neighbours' precision. A block's product is a sum of integers, exact in any order, and blocks are added
// in one order: a row's result is the same to the bit whatever rows stand beside it.

#ifdef __AVX512VNNI__

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "exponential.h"

namespace {

constexpr int64_t block = 64;  // inputs under one scale
constexpr int64_t width = 32;  // outputs of a tile: two registers of 16
constexpr int most = 6;        // rows at once: 2 * 6 sums of integers and as many of floats fill the registers

// Rows in 8 bits, between the two halves of int8_linear.
struct Quantized {
    std::vector<int8_t> values;    // [rows, inputs]
    std::vector<float> scales;     // [rows, inputs / block]
    std::vector<int32_t> offsets;  // [rows, inputs / block]: what weights that are 128 too large add to a block's sum

    void resize(int64_t rows, int64_t inputs) {
        values.resize(rows * inputs);
        scales.resize(rows * inputs / block);
        offsets.resize(rows * inputs / block);
    }
};

inline float sum_of_squares(const float* row, int64_t inputs) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 16) {
        const __m512 x = _mm512_loadu_ps(row + i);
        sum = _mm512_fmadd_ps(x, x, sum);
    }
    return _mm512_reduce_add_ps(sum);
}

void quantize(const float* row, const float* norm, float eps, int64_t inputs, int8_t* values, float* scales,
              int32_t* offsets) {
    const __m512 factor = _mm512_set1_ps(norm ? 1 / std::sqrt(sum_of_squares(row, inputs) / inputs + eps) : 1.0f);
    for (int64_t start = 0; start < inputs; start += block) {
        __m512 x[4], largest = _mm512_setzero_ps(), broken = _mm512_setzero_ps();
        for (int i = 0; i < 4; ++i) {
            x[i] = _mm512_loadu_ps(row + start + 16 * i);
            if (norm) x[i] = _mm512_mul_ps(_mm512_mul_ps(x[i], factor), _mm512_loadu_ps(norm + start + 16 * i));
            largest = _mm512_max_ps(largest, _mm512_abs_ps(x[i]));
            broken = _mm512_fmadd_ps(x[i], _mm512_setzero_ps(), broken);  // 0, or NaN where x is NaN or infinite
        }
        const float scale = std::max(_mm512_reduce_max_ps(largest), 1e-30f) / 127;
        const __m512 inverse = _mm512_set1_ps(1 / scale);
        __m512i sum = _mm512_setzero_si512();
        for (int i = 0; i < 4; ++i) {
            const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse));
            sum = _mm512_add_epi32(sum, rounded);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(values + start + 16 * i), _mm512_cvtsepi32_epi8(rounded));
        }
        scales[start / block] = scale + _mm512_reduce_add_ps(broken);
        offsets[start / block] = 128 * _mm512_reduce_add_epi32(sum);
    }
}

// 16 floats whose upper halves these are.
inline __m512 from_bfloat16(const uint16_t* values) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Sums of R rows for the 32 outputs of a tile, `weight` [inputs / 4, 32, 4], `steps` [inputs / 64, 32].
template <int R>
inline void multiply(const uint8_t* weight, const uint16_t* steps, const int8_t* values, const float* scales, const int32_t* offsets,
                     int64_t inputs, __m512 (&low)[most], __m512 (&high)[most]) {
    const int64_t blocks = inputs / block;
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
        __m512i first[R], second[R];
        for (int r = 0; r < R; ++r) first[r] = second[r] = _mm512_set1_epi32(-offsets[r * blocks + b]);
        for (int64_t k = 0; k < block / 4; ++k, weight += 4 * width) {
            _mm_prefetch(reinterpret_cast<const char*>(weight + 2048), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(weight + 2112), _MM_HINT_T0);
            const __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(weight + 64);
            for (int r = 0; r < R; ++r) {
                int32_t four;
                std::memcpy(&four, values + r * inputs + b * block + 4 * k, 4);
                const __m512i x = _mm512_set1_epi32(four);
                first[r] = _mm512_dpbusd_epi32(first[r], w0, x);
                second[r] = _mm512_dpbusd_epi32(second[r], w1, x);
            }
        }
        const __m512 step0 = from_bfloat16(steps + b * width), step1 = from_bfloat16(steps + b * width + 16);
        for (int r = 0; r < R; ++r) {
            const __m512 scale = _mm512_set1_ps(scales[r * blocks + b]);
            low[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(first[r]), _mm512_mul_ps(scale, step0), low[r]);
            high[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(second[r]), _mm512_mul_ps(scale, step1), high[r]);
        }
    }
}

void multiply(int rows, const uint8_t* weight, const uint16_t* steps, const int8_t* values, const float* scales,
              const int32_t* offsets, int64_t inputs, __m512 (&low)[most], __m512 (&high)[most]) {
    switch (rows) {
        case 1: return multiply<1>(weight, steps, values, scales, offsets, inputs, low, high);
        case 2: return multiply<2>(weight, steps, values, scales, offsets, inputs, low, high);
        case 3: return multiply<3>(weight, steps, values, scales, offsets, inputs, low, high);
        case 4: return multiply<4>(weight, steps, values, scales, offsets, inputs, low, high);
        case 5: return multiply<5>(weight, steps, values, scales, offsets, inputs, low, high);
        default: return multiply<most>(weight, steps, values, scales, offsets, inputs, low, high);
    }
}

inline __m512 silu(__m512 x) {
    alignas(64) float values[16];
    _mm512_store_ps(values, x);
#pragma omp simd
    for (int i = 0; i < 16; ++i) values[i] /= 1.0f + exponential(-values[i]);
    return _mm512_load_ps(values);
}

}  // namespace

enum After : int64_t { store, add, gate };

// rows: [count, inputs]; norm: [inputs], the factors of an RMS norm that comes first, or null; weight: [outputs / 32,
// inputs / 4, 32, 4], 128 added to each; steps: [outputs / 32, inputs / 64, 32] bfloat16, the weights' scales; out: [count, outputs], written to or added to. With
// `gate` a tile is 16 gates and their 16 values, and out [count, outputs / 2] gets silu(gate) * value. Inputs are
// a multiple of 64, outputs one of 32.
extern "C" void int8_linear(float* out, const float* rows, int64_t count, const float* norm, float eps,
                            const uint8_t* weight, const uint16_t* steps, int64_t outputs, int64_t inputs,
                            int64_t after) {
    static thread_local Quantized scratch;  // of the caller, whose threads share it
    Quantized& quantized = scratch;
    quantized.resize(count, inputs);
    const int64_t blocks = inputs / block;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < count; ++r)
            quantize(rows + r * inputs, norm, eps, inputs, &quantized.values[r * inputs],
                     &quantized.scales[r * blocks], &quantized.offsets[r * blocks]);
#pragma omp for schedule(dynamic)
        for (int64_t tile = 0; tile < outputs / width; ++tile) {
            for (int64_t start = 0; start < count; start += most) {
                const int some = static_cast<int>(std::min<int64_t>(most, count - start));
                __m512 low[most], high[most];
                multiply(some, weight + tile * width * inputs, steps + tile * width * blocks,
                         &quantized.values[start * inputs],
                         &quantized.scales[start * blocks], &quantized.offsets[start * blocks], inputs, low, high);
                for (int r = 0; r < some; ++r) {
                    __m512 first = low[r], second = high[r];
                    if (after == gate) {
                        float* to = out + (start + r) * (outputs / 2) + tile * 16;
                        _mm512_storeu_ps(to, _mm512_mul_ps(silu(first), second));
                        continue;
                    }
                    float* to = out + (start + r) * outputs + tile * width;
                    if (after == add) {
                        first = _mm512_add_ps(first, _mm512_loadu_ps(to));
                        second = _mm512_add_ps(second, _mm512_loadu_ps(to + 16));
                    }
                    _mm512_storeu_ps(to, first);
                    _mm512_storeu_ps(to + 16, second);
                }
            }
        }
    }
}

#endif

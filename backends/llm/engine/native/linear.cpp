// Products of float rows with a weight matrix in 8 bits, for x86 CPUs with AVX2 or AVX512-VNNI, and what stands around
// them in a decoder: the norm before, the sum or the gate after.
//
// Rows and weights are cut into blocks of 64 inputs, each in 8 bits with a scale of its own, so that one large value
// costs only its neighbours' precision. A block's product is a sum of integers, exact in any order, and blocks are added
// in one order: a row's result is the same to the bit whatever rows stand beside it.

#ifdef __AVX2__

#include "products.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "exponential.h"

#ifdef HAS_INT8_PRODUCTS

namespace {

// Rows in 8 bits, between the two halves of int8_linear.
struct Quantized {
    std::vector<int8_t> values;
    std::vector<float> scales;
    std::vector<int32_t> offsets;

    void resize(int64_t rows, int64_t inputs) {
        values.resize(rows * inputs);
        scales.resize(rows * inputs / block);
        offsets.resize(rows * inputs / block);
    }
};

void quantize(const float* row, const float* norm, float eps, int64_t inputs, int8_t* values, float* scales,
              int32_t* offsets) {
    float factor = 1;
    if (norm) {
        float squares = 0;
        for (int64_t i = 0; i < inputs; ++i) squares += row[i] * row[i];
        factor = 1 / std::sqrt(squares / inputs + eps);
    }
    for (int64_t start = 0; start < inputs; start += block) {
        float x[block], largest = 0, broken = 0;
        for (int64_t i = 0; i < block; ++i) {
            x[i] = norm ? row[start + i] * factor * norm[start + i] : row[start + i];
            const float size = std::fabs(x[i]);
            largest = largest > size ? largest : size;
            broken += x[i] * 0.0f;  // 0, or NaN where x is NaN or infinite
        }
        const float scale = std::max(largest, 1e-30f) / 127, inverse = 1 / scale;
        int32_t sum = 0;
        for (int64_t i = 0; i < block; ++i) {
            const auto rounded = static_cast<int8_t>(__builtin_irintf(x[i] * inverse));
            sum += rounded;
            values[start + i] = rounded;
        }
        scales[start / block] = scale + broken;
        offsets[start / block] = 128 * sum;
    }
}

}  // namespace

enum After : int64_t { store, add, gate };

// rows: [count, inputs]; norm: [inputs], the factors of an RMS norm that comes first, or null; weight, steps: for each 32
// outputs those of Factors; out: [count, outputs], written to or added to. With `gate` a tile is 16 gates and their 16
// values, and out [count, outputs / 2] gets silu(gate) * value. Inputs are a multiple of 64, outputs one of 32.
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
                float sums[most][width];
                multiply(some,
                         {weight + tile * width * inputs, steps + tile * width * blocks,
                          &quantized.values[start * inputs], &quantized.scales[start * blocks],
                          &quantized.offsets[start * blocks], inputs},
                         sums);
                for (int r = 0; r < some; ++r) {
                    const float* from = sums[r];
                    float* to = out + (start + r) * (after == gate ? outputs / 2 : outputs) +
                                tile * (after == gate ? width / 2 : width);
                    if (after == gate) {
#pragma omp simd
                        for (int i = 0; i < width / 2; ++i)
                            to[i] = from[i] / (1.0f + exponential(-from[i])) * from[i + width / 2];
                    } else if (after == add) {
                        for (int i = 0; i < width; ++i) to[i] += from[i];
                    } else {
                        std::copy_n(from, width, to);
                    }
                }
            }
        }
    }
}

#endif
#endif

// Attention of single queries over a paged KV cache, in float32, reading each key and value once and in place.
// The loops are written for the compiler to vectorise.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "exponential.h"

namespace {

template <int64_t D>
inline float dot(const float* a, const float* b, int64_t size) {
    const int64_t n = D ? D : size;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// sum[D] += factors[i] * rows[i * stride][D], with the sum in registers where D is known.
template <int64_t D>
inline void add_scaled(float* sum, const float* rows, const float* factors, int64_t count, int64_t stride,
                       int64_t size) {
    constexpr int64_t chunk = D ? 64 : 1;  // what fits into the registers
    const int64_t n = D ? D : size;
    for (int64_t start = 0; start < n; start += chunk) {
        float total[chunk];
        std::copy_n(sum + start, chunk, total);
        for (int64_t i = 0; i < count; ++i) {
            const float* row = rows + i * stride + start;
            const float factor = factors[i];
#pragma omp simd
            for (int64_t j = 0; j < chunk; ++j) total[j] += factor * row[j];
        }
        std::copy_n(total, chunk, sum + start);
    }
}

// The queries of one sequence that share a KV head. `scores` has room for repeats * length.
template <int64_t D>
void attend(float* out, const float* query, const float* keys, const float* values, const int64_t* table, int64_t first,
            int64_t length, int64_t repeats, int64_t size, int64_t block_size, int64_t stride, float scale,
            float softcap, float* scores) {
    // Calls f(number of the first, how many, where their rows begin) for the tokens of each block.
    const auto for_each_block = [&](const float* cache, auto f) {
        for (int64_t done = 0; done < length;) {
            const int64_t position = first + done, offset = position % block_size;
            const int64_t count = std::min(block_size - offset, length - done);
            f(done, count, cache + (table[position / block_size] * block_size + offset) * stride);
            done += count;
        }
    };
    for_each_block(keys, [&](int64_t start, int64_t count, const float* rows) {
        for (int64_t i = 0; i < count; ++i)
            for (int64_t r = 0; r < repeats; ++r)
                scores[r * length + start + i] = scale * dot<D>(query + r * size, rows + i * stride, size);
    });
    for (int64_t r = 0; r < repeats; ++r) {
        float* row = scores + r * length;
        if (softcap > 0)
            for (int64_t i = 0; i < length; ++i) row[i] = softcap * std::tanh(row[i] / softcap);
        float largest = row[0], sum = 0;
        for (int64_t i = 1; i < length; ++i) largest = row[i] > largest ? row[i] : largest;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < length; ++i) sum += row[i] = exponential(row[i] - largest);
        const float share = 1 / sum;
#pragma omp simd
        for (int64_t i = 0; i < length; ++i) row[i] *= share;
    }
    std::fill(out, out + repeats * size, 0.0f);
    for_each_block(values, [&](int64_t start, int64_t count, const float* rows) {
        for (int64_t r = 0; r < repeats; ++r)
            add_scaled<D>(out + r * size, rows, scores + r * length + start, count, stride, size);
    });
}

}  // namespace

// out, query: [B, heads, size]; keys, values: [blocks, block_size, kv_heads, size]; tables: [B, width] blocks of each
// sequence; contexts: [B] tokens each, the query's own included; window: tokens that a query sees, 0 for all;
// softcap: scores become softcap * tanh(scores / softcap), 0 for no cap.
extern "C" void paged_decode(float* out, const float* query, int64_t query_stride, const float* keys,
                             const float* values, const int64_t* tables, const int64_t* contexts, int64_t batch,
                             int64_t width, int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size,
                             int64_t window, float scale, float softcap) {
    const int64_t repeats = heads / kv_heads;
#pragma omp parallel
    {
        std::vector<float> scores;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t h = 0; h < kv_heads; ++h) {
                const int64_t first = window ? std::max<int64_t>(0, contexts[b] - window) : 0;
                const int64_t length = contexts[b] - first;
                if (static_cast<int64_t>(scores.size()) < repeats * length) scores.resize(repeats * length);
                const int64_t head = h * repeats;
                auto* run = size == 64 ? attend<64> : size == 128 ? attend<128> : attend<0>;
                run(out + (b * heads + head) * size, query + b * query_stride + head * size, keys + h * size,
                    values + h * size, tables + b * width, first, length, repeats, size, block_size, kv_heads * size,
                    scale, softcap, scores.data());
            }
        }
    }
}

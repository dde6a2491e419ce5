// Rotary embedding of a step's queries and keys, and its keys and values on their way into the paged cache.

#include <algorithm>
#include <cstdint>

// qkv: [count, heads + 2 * kv_heads, size], its queries turned in place; rotation: [length, size / 2] complex, what turns
// the pairs (2i, 2i + 1) of a head at each position; positions, slots: [count]; keys, values: [slots, kv_heads, size].
extern "C" void rotate_and_store(float* qkv, int64_t count, int64_t heads, int64_t kv_heads, int64_t size,
                                 const float* rotation, const int64_t* positions, const int64_t* slots, float* keys,
                                 float* values) {
    const int64_t row = (heads + 2 * kv_heads) * size;
#pragma omp parallel for schedule(static) if (count > 2)
    for (int64_t t = 0; t < count; ++t) {
        const float* turn = rotation + positions[t] * size;
        for (int64_t h = 0; h < heads + kv_heads; ++h) {
            float* head = qkv + t * row + h * size;
            float* to = h < heads ? head : keys + (slots[t] * kv_heads + h - heads) * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i += 2) {
                const float a = head[i], b = head[i + 1], cosine = turn[i], sine = turn[i + 1];
                to[i] = a * cosine - b * sine;
                to[i + 1] = a * sine + b * cosine;
            }
        }
        std::copy_n(qkv + t * row + (heads + kv_heads) * size, kv_heads * size, values + slots[t] * kv_heads * size);
    }
}

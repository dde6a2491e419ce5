// Attention of single queries over a paged KV cache, in float32, reading each key and value once and in place.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "exponential.h"

namespace {

// 16 floats, whatever registers the CPU has.
constexpr int64_t lanes = 16;
typedef float Vector __attribute__((vector_size(4 * lanes)));
typedef float Unaligned __attribute__((vector_size(4 * lanes), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void save(float* to, Vector x) { *reinterpret_cast<Unaligned*>(to) = x; }

// The sums of 16 vectors' lanes, one in each lane of the result.
inline Vector sums(const Vector* rows) {
    Vector two[8], four[4], eight[2];
    for (int i = 0; i < 8; ++i) {
        const Vector a = rows[2 * i], b = rows[2 * i + 1];
        two[i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    for (int i = 0; i < 4; ++i) {
        const Vector a = two[2 * i], b = two[2 * i + 1];
        four[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    const auto halves = [](Vector a, Vector b) {
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    for (int i = 0; i < 2; ++i) eight[i] = halves(four[2 * i], four[2 * i + 1]);
    return halves(eight[0], eight[1]);
}

// What one task needs to know of the cache: where a sequence's tokens are.
struct Pages {
    const int64_t* table;
    int64_t first, length, block_size, stride;

    // Calls f(number of the first, how many, where their rows begin, where the next ones do) for at most 16 tokens that
    // stand one after the other.
    template <typename F>
    void for_each_run(const float* cache, F f) const {
        for (int64_t done = 0; done < length;) {
            const int64_t count = run(done), next = done + count;
            f(done, count, row(cache, done), row(cache, next < length ? next : done));
            done = next;
        }
    }

   private:
    int64_t run(int64_t done) const {
        return std::min({lanes, block_size - (first + done) % block_size, length - done});
    }
    const float* row(const float* cache, int64_t done) const {
        const int64_t position = first + done;
        return cache + (table[position / block_size] * block_size + position % block_size) * stride;
    }
};

inline void prefetch(const float* row, int64_t size) {
    for (int64_t i = 0; i < size; i += lanes) __builtin_prefetch(row + i, 0, 2);
}

// scores[r][i] = scale * query[r] . rows[i], for R queries of V vectors each; `length` is the distance of scores' rows.
template <int V, int R>
inline void dots(float* scores, int64_t length, const float* query, const float* rows, const float* next, int64_t count,
                 int64_t stride, float scale) {
    Vector queries[R][V], products[R][lanes] = {};
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) queries[r][v] = load(query + (r * V + v) * lanes) * scale;
    for (int64_t i = 0; i < count; ++i) {
        prefetch(next + i * stride, V * lanes);
        Vector key[V];
        for (int v = 0; v < V; ++v) key[v] = load(rows + i * stride + v * lanes);
        for (int r = 0; r < R; ++r) {
            Vector sum = queries[r][0] * key[0];
            for (int v = 1; v < V; ++v) sum += queries[r][v] * key[v];
            products[r][i] = sum;
        }
    }
    for (int r = 0; r < R; ++r) {
        const Vector sum = sums(products[r]);
        for (int64_t i = 0; i < count; ++i) scores[r * length + i] = sum[i];
    }
}

// out[r] += the sum of scores[r][i] * rows[i].
template <int V, int R>
inline void add_scaled(float* out, const float* scores, int64_t length, const float* rows, const float* next,
                       int64_t count, int64_t stride) {
    Vector total[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) total[r][v] = load(out + (r * V + v) * lanes);
    for (int64_t i = 0; i < count; ++i) {
        prefetch(next + i * stride, V * lanes);
        for (int v = 0; v < V; ++v) {
            const Vector value = load(rows + i * stride + v * lanes);
            for (int r = 0; r < R; ++r) total[r][v] += scores[r * length + i] * value;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) save(out + (r * V + v) * lanes, total[r][v]);
}

inline void softmax(float* row, int64_t length, float softcap) {
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

// The queries that share `kv_heads` KV heads, `repeats` each, of one sequence: V vectors a head, R queries at a time.
template <int V, int R>
void attend(float* out, const float* query, const float* keys, const float* values, const Pages& pages,
            int64_t kv_heads, int64_t repeats, float scale, float softcap, float* scores) {
    constexpr int64_t size = V * lanes;
    const int64_t length = pages.length, heads = kv_heads * repeats;
    // All heads of a run of tokens before the next: what stands together in memory is read together.
    pages.for_each_run(keys, [&](int64_t start, int64_t count, const float* rows, const float* next) {
        for (int64_t head = 0; head < heads; head += R) {
            const int64_t kv = head / repeats * size;
            dots<V, R>(scores + head * length + start, length, query + head * size, rows + kv, next + kv, count,
                       pages.stride, scale);
        }
    });
    for (int64_t head = 0; head < heads; ++head) softmax(scores + head * length, length, softcap);
    std::fill(out, out + heads * size, 0.0f);
    pages.for_each_run(values, [&](int64_t start, int64_t count, const float* rows, const float* next) {
        for (int64_t head = 0; head < heads; head += R) {
            const int64_t kv = head / repeats * size;
            add_scaled<V, R>(out + head * size, scores + head * length + start, length, rows + kv, next + kv, count,
                             pages.stride);
        }
    });
}

using Attend = decltype(&attend<1, 1>);

// As many queries at a time as registers hold sums for.
template <int V>
Attend for_repeats(int64_t repeats) {
    if (V * 4 <= 16 && repeats % 4 == 0) return attend<V, 4>;
    if (V * 3 <= 16 && repeats % 3 == 0) return attend<V, 3>;
    if (repeats % 2 == 0) return attend<V, 2>;
    return attend<V, 1>;
}

Attend attend_for(int64_t size, int64_t repeats) {
    switch (size) {
        case 16: return for_repeats<1>(repeats);
        case 32: return for_repeats<2>(repeats);
        case 64: return for_repeats<4>(repeats);
        case 80: return for_repeats<5>(repeats);
        case 96: return for_repeats<6>(repeats);
        case 128: return for_repeats<8>(repeats);
        case 256: return for_repeats<16>(repeats);
        default: return nullptr;
    }
}

}  // namespace

// Whether paged_decode can do heads of this size.
extern "C" int paged_decode_fits(int64_t size) { return attend_for(size, 1) != nullptr; }

// out, query: [B, heads, size]; keys, values: [blocks, block_size, kv_heads, size]; tables: [B, width] blocks of each
// sequence; contexts: [B] tokens each, the query's own included; window: tokens that a query sees, 0 for all;
// softcap: scores become softcap * tanh(scores / softcap), 0 for no cap.
extern "C" void paged_decode(float* out, const float* query, int64_t query_stride, const float* keys,
                             const float* values, const int64_t* tables, const int64_t* contexts, int64_t batch,
                             int64_t width, int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size,
                             int64_t window, float scale, float softcap) {
    const int64_t repeats = heads / kv_heads;
    const Attend run = attend_for(size, repeats);
    // Few sequences are shared out by heads, so that no thread idles.
    const int64_t parts = batch < 16 ? kv_heads : 1, some = kv_heads / parts;
#pragma omp parallel
    {
        std::vector<float> scores;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t first = window ? std::max<int64_t>(0, contexts[b] - window) : 0;
                const Pages pages{tables + b * width, first, contexts[b] - first, block_size, kv_heads * size};
                const int64_t needed = some * repeats * pages.length;
                if (static_cast<int64_t>(scores.size()) < needed) scores.resize(needed);
                const int64_t head = part * some * repeats;
                run(out + (b * heads + head) * size, query + b * query_stride + head * size, keys + part * some * size,
                    values + part * some * size, pages, some, repeats, scale, softcap, scores.data());
            }
        }
    }
}

// Tree attention over slots. A row sees positions [start, length) of its own sequence: those below `seen` by the slot table,
// the rest by its path through the tree, in order of depth. Scores, denominator and values are summed in that order, so
// that a row's bits depend on its own keys alone.
//
// A task is some queries of one sequence and one key/value head: its keys and values are read once for all of them. Lanes
// of scores are keys, as many as a register holds: few queries and many take the same way.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "export.h"
#include "ops.h"
#include "team.h"

namespace {

constexpr int MOST_QUERIES = 16;                         // of a task
constexpr int SCORED_AT_ONCE = REGISTERS / 2;            // queries; the other registers hold keys
constexpr int MOST_VECTORS = REGISTERS < 32 ? 2 : 4;     // of a line of values that are summed at once
constexpr int WEIGHED_AT_ONCE = (REGISTERS - 1 - MOST_VECTORS) / (MOST_VECTORS + 1);  // queries, each with its denominator
constexpr int STRIDE = MOST_DIM + 16;                    // between queries, which do not meet in the same lines of a cache
constexpr float NEVER = -1e30f, LOG2_E = 1.44269504f;

struct Query {  // a row and one of its heads
    int64_t row, head;
    int start, length;
    float sink = 0;  // weight without a value, in the denominator
};

template <class T>
struct Task {
    const Layer<T>& layer;
    const Rows& rows;
    const int64_t* table;
    int64_t head;  // of keys and values
    int count = 0, first = INT32_MAX, shared = 0, stride = 0;  // positions [first, shared) are read for all queries
    Query queries[MOST_QUERIES];
    float scaled[MOST_QUERIES][STRIDE];
    float* lines = nullptr;  // [queries, stride]: scores, then weights, by position from `first` on

    Task(const Layer<T>& layer, const Rows& rows, const int64_t* table, int64_t head)
        : layer(layer), rows(rows), table(table), head(head) {}
    float* line(int query, int position) const { return lines + size_t(query) * stride + (position - first); }
    int64_t own_slot(int64_t row, int position) const { return rows.path_slots[rows.path_start[row] + position - shared]; }
};

typedef float Quad __attribute__((vector_size(16), aligned(2), may_alias));

// 16 bytes of each of LANES / 4 keys, the first and every fourth after it.
template <class T>
inline Vec every_fourth(const T* const* keys, int64_t d) {
    auto quad = [&](int key) { return *(const Quad*)(keys[key] + d); };
#if defined(__AVX512F__)
    auto pair = [&](int key) { return _mm256_insertf128_ps(_mm256_castps128_ps256((__m128)quad(key)), (__m128)quad(key + 4), 1); };
    return (Vec)_mm512_insertf32x8(_mm512_castps256_ps512(pair(0)), pair(8), 1);
#elif defined(__AVX2__)
    return (Vec)_mm256_insertf128_ps(_mm256_castps128_ps256((__m128)quad(0)), (__m128)quad(4), 1);
#else
    return (Vec)quad(0);
#endif
}

// Of each four lanes of a and b, from FROM on two pieces of SIZE lanes, by turns.
template <int SIZE, int FROM, int... I>
inline Vec by_turns(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / SIZE % 2 * LANES + I / 4 * 4 + FROM + I % 4 / (2 * SIZE) * SIZE + I % SIZE)...);
}

// Of two bf16 that lie in 32 bits.
inline Vec low_of(IVec pair) { return (Vec)(pair << 16); }
inline Vec high_of(IVec pair) { return (Vec)(pair & INT32_C(-65536)); }

// A column of keys, or two that lie in 32 bits.
inline float* put_columns(float* to, const float*, Vec column) { return store(to, column), to + LANES; }
inline float* put_columns(float* to, const bf16*, Vec pair) {
    store(to, low_of((IVec)pair)), store(to + LANES, high_of((IVec)pair));
    return to + 2 * LANES;
}

// to [dim, LANES]: keys side by side.
template <class T>
void side_by_side(const T* const* keys, int64_t dim, float* to) {
    constexpr auto ALL = std::make_integer_sequence<int, LANES>();
    constexpr int64_t PIECE = 16 / sizeof(T);
    int64_t d = 0;
    for (; d + PIECE <= dim; d += PIECE) {
        Vec parts[4], halves[4];
        for (int i = 0; i < 4; i++) parts[i] = every_fourth(keys + i, d);
        for (int i = 0; i < 4; i += 2) {
            halves[i] = by_turns<1, 0>(parts[i], parts[i + 1], ALL);
            halves[i + 1] = by_turns<1, 2>(parts[i], parts[i + 1], ALL);
        }
        for (int i = 0; i < 2; i++) {
            to = put_columns(to, *keys, by_turns<2, 0>(halves[i], halves[i + 2], ALL));
            to = put_columns(to, *keys, by_turns<2, 2>(halves[i], halves[i + 2], ALL));
        }
    }
    for (; d < dim; d++, to += LANES)
        for (int lane = 0; lane < LANES; lane++) to[lane] = to_float(keys[lane][d]);
}

// Scores of LANES keys [dim, LANES] for some queries, to their lines.
template <int QUERIES>
void score_some(const float* keys, int64_t dim, const float (*queries)[STRIDE], float* to, int stride) {
    Vec sums[QUERIES] = {};
    for (int64_t d = 0; d < dim; d++) {
        const Vec key = load(keys + d * LANES);
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; q++) sums[q] = fused(splat(queries[q][d]), key, sums[q]);
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++) store(to + q * stride, sums[q]);
}

using Score = void (*)(const float*, int64_t, const float (*)[STRIDE], float*, int);
template <int... NUMBERS>
constexpr std::array<Score, sizeof...(NUMBERS)> scores_of(std::integer_sequence<int, NUMBERS...>) {
    return {score_some<NUMBERS + 1>...};
}

// Scores of LANES keys from `position` on for queries [begin, end).
template <class T>
void score_keys(Task<T>& task, const T* const* keys, int begin, int end, int position) {
    static constexpr auto SCORES = scores_of(std::make_integer_sequence<int, SCORED_AT_ONCE>());
    alignas(64) float beside[MOST_DIM * LANES];
    side_by_side(keys, task.layer.dim, beside);
    for (int query = begin; query < end; query += SCORED_AT_ONCE)
        SCORES[std::min(SCORED_AT_ONCE, end - query) - 1](beside, task.layer.dim, task.scaled + query,
                                                          task.line(query, position), task.stride);
}

template <class T>
void score_all(Task<T>& task, int heads) {
    const Layer<T>& layer = task.layer;
    const T* keys[LANES];
    for (int position = task.first; position < task.shared; position += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            const int at = std::min(position + lane, task.shared - 1);
            keys[lane] = layer.at(layer.keys, task.table[at], task.head);
            layer.prefetch(layer.keys, task.table[std::min(at + LANES, task.shared - 1)], task.head);
            layer.prefetch(layer.values, task.table[at], task.head);  // slots lie scattered
        }
        score_keys(task, keys, 0, task.count, position);
    }
    for (int query = 0; query < task.count; query += heads) {  // a row's own path
        const Query& own = task.queries[query];
        for (int position = task.shared; position < own.length; position += LANES) {
            for (int lane = 0; lane < LANES; lane++)
                keys[lane] = layer.at(layer.keys, task.own_slot(own.row, std::min(position + lane, own.length - 1)), task.head);
            score_keys(task, keys, query, query + heads, position);
        }
    }
}

Vec capped(Vec scores, float softcap) {  // softcap tanh(x / softcap), all in powers of two
    if (softcap == 0.0f) return scores;
    Vec magnitude = (Vec)((IVec)scores & 0x7fffffff);
    Vec e = exp2_of(magnitude * (-2.0f * LOG2_E / softcap));  // exp(-2 |x| / softcap)
    Vec bounded = (1.0f - e) / (1.0f + e) * softcap;
    return scores < 0.0f ? -bounded : bounded;
}

// A query's scores become weights: powers of two, of which the largest, maybe the sink's, is 1, and 0 where it sees nothing.
template <class T>
void weights_of(const Task<T>& task, Query& query, float* line) {
    Vec top = splat(NEVER);
    IVec position;
    for (int lane = 0; lane < LANES; lane++) position[lane] = task.first + lane;
    const int size = std::max(query.length, task.shared) - task.first;
    for (int i = 0; i < size; i += LANES, position += LANES) {
        IVec visible = (query.start <= position) & (position < query.length);
        Vec scores = visible ? capped(load(line + i), task.layer.softcap) : splat(NEVER);
        top = scores > top ? scores : top;
        store(line + i, scores);
    }
    float most = NEVER;
    for (int lane = 0; lane < LANES; lane++) most = std::max(most, top[lane]);
    if (const float* sinks = task.layer.sinks) {
        const float sink = sinks[query.head] * LOG2_E;
        most = std::max(most, sink), query.sink = exp2_of(splat(sink - most))[0];
    }
    for (int i = 0; i < size; i += LANES) store(line + i, exp2_of(load(line + i) - most));
}

template <int VECTORS>
struct Weighed {  // of a query: values times weights, of some columns, and the weights themselves
    Vec values[VECTORS], total;
};

// 2 LANES values as two vectors, as their type does it best: bf16 at even and at odd places.
inline void load_two(const float* from, Vec& first, Vec& second) { first = load(from), second = load(from + LANES); }
inline void load_two(const bf16* from, Vec& even, Vec& odd) {
    IVec pairs;
    memcpy(&pairs, from, sizeof(pairs));
    even = low_of(pairs), odd = high_of(pairs);
}

template <int... I>
inline void store_two(float* to, Vec first, Vec second, std::integer_sequence<int, I...>) {
    store(to, first), store(to + LANES, second);
}
template <int... I>
inline void store_two(bf16* to, Vec even, Vec odd, std::integer_sequence<int, I...>) {
    store(to, __builtin_shufflevector(even, odd, (I / 2 + I % 2 * LANES)...));
    store(to + LANES, __builtin_shufflevector(even, odd, (LANES / 2 + I / 2 + I % 2 * LANES)...));
}

template <int VECTORS, class T>
inline void read_values(const T* from, int64_t left, Vec (&values)[VECTORS]) {
    if constexpr (VECTORS == 1)
        values[0] = load_end(from, left);
    else
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v += 2) load_two(from + v * LANES, values[v], values[v + 1]);
}

// What queries from `begin` on get of the positions that are read for all, of VECTORS vectors from a column on.
template <int VECTORS, int QUERIES, class T>
void weigh_shared(const Task<T>& task, int begin, int64_t column, Weighed<VECTORS>* to) {
    Vec sums[QUERIES][VECTORS] = {}, totals[QUERIES] = {}, values[VECTORS];
    const float* weights = task.line(begin, task.first);
    const int64_t *slot = task.table + task.first, *end = task.table + task.shared, left = task.layer.dim - column;
    for (; slot < end; slot++, weights++) {
        read_values(task.layer.at(task.layer.values, *slot, task.head) + column, left, values);
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; q++) {
            const Vec weight = splat(weights[q * task.stride]);
            totals[q] = totals[q] + weight;
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[q][v] = fused(weight, values[v], sums[q][v]);
        }
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++) {
        to[q].total = totals[q];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) to[q].values[v] = sums[q][v];
    }
}

// A query's result, to which its own path is added.
template <int VECTORS, class T>
void finish(const Task<T>& task, int query, int64_t column, Weighed<VECTORS> sums, T* out) {
    const Query& own = task.queries[query];
    const int64_t dim = task.layer.dim;
    for (int position = task.shared; position < own.length; position++) {
        Vec values[VECTORS];
        const int64_t slot = task.own_slot(own.row, position);
        read_values(task.layer.at(task.layer.values, slot, task.head) + column, dim - column, values);
        const Vec weight = splat(*task.line(query, position));
        sums.total = sums.total + weight;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums.values[v] = fused(weight, values[v], sums.values[v]);
    }
    sums.total = sums.total + own.sink;
    T* to = out + (own.row * task.layer.query_heads + own.head) * dim + column;
    if constexpr (VECTORS == 1)
        store_end(to, sums.values[0] / sums.total, dim - column);
    else
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v += 2)
            store_two(to + v * LANES, sums.values[v] / sums.total, sums.values[v + 1] / sums.total,
                      std::make_integer_sequence<int, LANES>());
}

template <int VECTORS, class T>
using Weigh = void (*)(const Task<T>&, int, int64_t, Weighed<VECTORS>*);
template <int VECTORS, class T, int... NUMBERS>
constexpr std::array<Weigh<VECTORS, T>, sizeof...(NUMBERS)> weighers(std::integer_sequence<int, NUMBERS...>) {
    return {weigh_shared<VECTORS, NUMBERS + 1, T>...};
}

// Results of queries [begin, begin + count), of VECTORS vectors from a column on.
template <int VECTORS, class T>
void weigh(const Task<T>& task, int begin, int count, int64_t column, T* out) {
    static constexpr auto WEIGHERS = weighers<VECTORS, T>(std::make_integer_sequence<int, WEIGHED_AT_ONCE>());
    Weighed<VECTORS> sums[WEIGHED_AT_ONCE];
    WEIGHERS[count - 1](task, begin, column, sums);
    for (int q = 0; q < count; q++) finish(task, begin + q, column, sums[q], out);
}

template <class T>
void weigh_all(const Task<T>& task, T* out) {
    constexpr int64_t WIDE = MOST_VECTORS * LANES;
    const int64_t dim = task.layer.dim;
    const int parts = (task.count + WEIGHED_AT_ONCE - 1) / WEIGHED_AT_ONCE;
    for (int part = 0; part < parts; part++) {
        const int begin = task.count * part / parts, count = task.count * (part + 1) / parts - begin;
        for (int64_t column = 0; column < dim;)
            if (dim >= WIDE && column + WIDE - LANES < dim)
                weigh<MOST_VECTORS>(task, begin, count, std::min(column, dim - WIDE), out), column += WIDE;
            else  // vectors may overlap: their results are the same
                weigh<1>(task, begin, count, std::max<int64_t>(0, std::min(column, dim - LANES)), out), column += LANES;
    }
}

// Of each of a group's rows the `heads` query heads from `first_head` on, which share one head of keys and values.
template <class T>
void add_queries(Task<T>& task, const int32_t* group_rows, int num_rows, int64_t first_head, int64_t heads, const T* query) {
    const Layer<T>& layer = task.layer;
    const Rows& rows = task.rows;
    int longest = 0;
    for (int i = 0; i < num_rows; i++) {
        const int64_t row = group_rows[i];
        const int length = rows.seen[row] + rows.path_start[row + 1] - rows.path_start[row];
        const int start = layer.window ? int(std::max<int64_t>(0, length - layer.window)) : 0;
        task.first = std::min(task.first, start), longest = std::max(longest, length);
        task.shared = std::max(task.shared, rows.seen[row]);  // a tree's rows see all of the table's
        for (int64_t head = first_head; head < first_head + heads; head++) {
            float* scaled = task.scaled[task.count];
            task.queries[task.count++] = {row, head, start, length};
            const T* from = query + (row * layer.query_heads + head) * layer.dim;
            for (int64_t d = 0; d < layer.dim; d++) scaled[d] = to_float(from[d]) * layer.scale;
        }
    }
    task.first = std::min(task.first, task.shared);
    task.stride = (longest - task.first + 2 * LANES - 1) / LANES * LANES;  // a line's last keys may be fewer than LANES
}

// Each thread gets as many tasks; the rows of what is left over are divided among threads, too.
template <class Body>
void for_each_task(int64_t tasks, const Body& body) {
    const int64_t threads = threads_in_use(), whole = tasks / threads, rest = tasks % threads;
    const int64_t shares = rest ? threads / rest : 0, of_thread = whole + (rest > 0);
    for_each(threads * of_thread, false, [=](int64_t number) {
        const int64_t thread = number / of_thread, own = number % of_thread;
        if (own < whole)
            body(thread * whole + own, 0, 1);
        else if (thread < rest * shares)
            body(threads * whole + thread / shares, thread % shares, shares);
    });
}

}  // namespace

template <class T>
void attend(const Layer<T>* layer, const Rows* rows, const int32_t* groups, int64_t num_groups, const int64_t* tables,
            int64_t table_width, const T* query, T* out) {
    const int64_t all = layer->query_heads / layer->kv_heads, parts = (all + MOST_QUERIES - 1) / MOST_QUERIES;
    for_each_task(num_groups * layer->kv_heads * parts, [=](int64_t number, int64_t share, int64_t shares) {
        static thread_local std::vector<float> lines;
        const int32_t* group = groups + number / parts / layer->kv_heads * 3;  // first place in the order, rows, table line
        const int64_t head = number / parts % layer->kv_heads, part = number % parts;
        const int64_t first = all * part / parts, heads = all * (part + 1) / parts - first;
        const int begin = int(group[1] * share / shares), end = int(group[1] * (share + 1) / shares);
        if (begin == end) return;
        Task<T> task(*layer, *rows, tables + group[2] * table_width, head);
        add_queries(task, rows->order + group[0] + begin, end - begin, head * all + first, heads, query);
        lines.resize(size_t(task.count) * task.stride);
        task.lines = lines.data();
        score_all(task, int(heads));
        for (int i = 0; i < task.count; i++) weights_of(task, task.queries[i], task.line(i, task.first));
        weigh_all(task, out);
    });
}

template void attend(const Layer<bf16>*, const Rows*, const int32_t*, int64_t, const int64_t*, int64_t, const bf16*, bf16*);
template void attend(const Layer<float>*, const Rows*, const int32_t*, int64_t, const int64_t*, int64_t, const float*, float*);

int64_t attend_lanes() { return MOST_QUERIES; }  // queries that are computed side by side

EXPORT(attend_lanes)
EXPORT_TYPES(attend)

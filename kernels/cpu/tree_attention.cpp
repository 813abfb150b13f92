// Tree attention over slots. A row sees positions [start, length) of its own sequence: those below `seen` by the slot table,
// the rest by its path through the tree, in order of depth. Scores, denominator and values are summed in that order, so
// that a row's bits depend on its own keys alone.
#include <algorithm>
#include <vector>

#include "export.h"
#include "ops.h"
#include "team.h"

namespace {

constexpr int MOST_VECTORS = 4;  // of a line of values that are summed at once
constexpr int KEYS_AT_ONCE = 4;
constexpr int AHEAD = 8;  // positions between a prefetch and its use: slots lie scattered
constexpr float NEVER = -1e30f;

struct Query {  // one lane: a row and one of its heads
    int64_t row;
    int start, length;
};

Vec score(const float (*queries)[LANES], const float* key, int64_t dim) {
    Vec sum{};
    for (int64_t d = 0; d < dim; d++) sum = sum + load(queries[d]) * key[d];
    return sum;
}

Vec capped(Vec scores, float softcap) {  // softcap tanh(x / softcap), all in powers of two
    if (softcap == 0.0f) return scores;
    Vec magnitude = (Vec)((IVec)scores & 0x7fffffff);
    Vec e = exp2_of(magnitude * (-2.0f * 1.44269504f / softcap));  // exp(-2 |x| / softcap)
    Vec bounded = (1.0f - e) / (1.0f + e) * softcap;
    return scores < 0.0f ? -bounded : bounded;
}

// Up to LANES queries of one sequence: some rows, of each `heads` query heads of one key/value head, from `first_head` on.
template <class T>
void attend_group(const Layer& layer, const Rows& rows, const int32_t* group_rows, int num_rows, const int64_t* table,
                  int64_t head, int64_t first_head, int64_t heads, const T* query, T* out) {
    static thread_local std::vector<float> weights;  // [positions, LANES]
    float queries[MOST_DIM][LANES] = {};
    Query lanes[LANES];
    IVec start{}, length{};
    const int64_t dim = layer.dim;
    const int count = int(num_rows * heads);
    int first = INT32_MAX, common = INT32_MAX, most = 0;
    for (int lane = 0; lane < count; lane++) {
        int64_t row = group_rows[lane / heads], own_head = first_head + lane % heads;
        int end = rows.seen[row] + rows.path_start[row + 1] - rows.path_start[row];
        int begin = layer.window ? int(std::max<int64_t>(0, end - layer.window)) : 0;
        lanes[lane] = {row, begin, end};
        start[lane] = begin, length[lane] = end;
        first = std::min(first, begin), common = std::min(common, rows.seen[row]), most = std::max(most, end);
        const T* from = query + (row * layer.query_heads + own_head) * dim;
        for (int64_t d = 0; d < dim; d++) queries[d][lane] = to_float(from[d]) * layer.scale;
    }
    first = std::min(first, common);
    weights.resize(size_t(most + 1) * LANES);  // the last queries are read beyond their line
    auto line = [&](int position) { return weights.data() + size_t(position) * LANES; };
    auto slot_of = [&](int64_t row, int position) {
        return position < rows.seen[row] ? table[position] : rows.path_slots[rows.path_start[row] + position - rows.seen[row]];
    };

    int position = first;
    for (; position + KEYS_AT_ONCE <= common; position += KEYS_AT_ONCE) {
        const float* keys[KEYS_AT_ONCE];
        Vec sums[KEYS_AT_ONCE] = {};
        for (int k = 0; k < KEYS_AT_ONCE; k++) {
            keys[k] = layer.at(layer.keys, table[position + k], head);
            layer.prefetch(layer.keys, table[std::min(position + k + AHEAD, common - 1)], head);
        }
        for (int64_t d = 0; d < dim; d++) {
            Vec x = load(queries[d]);
            for (int k = 0; k < KEYS_AT_ONCE; k++) sums[k] = sums[k] + x * keys[k][d];
        }
        for (int k = 0; k < KEYS_AT_ONCE; k++) store(line(position + k), sums[k]);
    }
    for (; position < common; position++) store(line(position), score(queries, layer.at(layer.keys, table[position], head), dim));
    for (int lane = 0; lane < count; lane += int(heads))  // what a row does not share with the others
        for (int own = common; own < lanes[lane].length; own++) {
            Vec scores = score(queries, layer.at(layer.keys, slot_of(lanes[lane].row, own), head), dim);
            for (int h = 0; h < heads; h++) line(own)[lane + h] = scores[lane + h];
        }

    Vec top = splat(NEVER), total{};
    for (int i = first; i < most; i++) {
        IVec visible = (start <= i) & (i < length);
        Vec scores = visible ? capped(load(line(i)), layer.softcap) : splat(NEVER);
        top = scores > top ? scores : top;
        store(line(i), scores);
    }
    for (int i = first; i < most; i++) {
        Vec weight = exp2_of(load(line(i)) - top);
        total = total + weight;
        store(line(i), weight);
    }

    auto weigh = [&](auto vectors, int64_t column) {  // so many vectors of all values, from a column on
        constexpr int VECTORS = vectors, AT_ONCE = std::min(MOST_SUMS / VECTORS, LANES);
        float end[LANES];  // of a line that fills no whole number of vectors
        auto value = [&](const float* from, int v) {
            const float* at = from + column + v * LANES;
            const int64_t left = dim - column - v * LANES;
            if (v == VECTORS - 1 && left < LANES) {
                memset(end, 0, sizeof(end)), memcpy(end, at, size_t(left) * sizeof(float));
                at = end;
            }
            asm("" : "+r"(at));  // or products move into the branches above, where no addition is left to fuse them with
            return load(at);
        };
        for (int lane = 0; lane < count; lane += AT_ONCE) {
            Vec sums[AT_ONCE][VECTORS] = {};
            for (int i = first; i < common; i++) {
                const float* from = layer.at(layer.values, table[i], head);
                layer.prefetch(layer.values, table[std::min(i + AHEAD, common - 1)], head);
                Vec values[VECTORS];
                for (int v = 0; v < VECTORS; v++) values[v] = value(from, v);
                const float* weight = line(i) + lane;
                for (int q = 0; q < AT_ONCE; q++)
                    for (int v = 0; v < VECTORS; v++) sums[q][v] = sums[q][v] + weight[q] * values[v];
            }
            for (int q = 0; q < std::min(AT_ONCE, count - lane); q++) {
                const Query& own = lanes[lane + q];
                for (int i = common; i < own.length; i++) {
                    const float* from = layer.at(layer.values, slot_of(own.row, i), head);
                    for (int v = 0; v < VECTORS; v++) sums[q][v] = sums[q][v] + line(i)[lane + q] * value(from, v);
                }
                T* to = out + (own.row * layer.query_heads + first_head + (lane + q) % heads) * dim + column;
                for (int v = 0; v < VECTORS; v++)
                    store_end(to + v * LANES, sums[q][v] / total[lane + q], dim - column - v * LANES);
            }
        }
    };
    int64_t column = 0;
    for (; column + (MOST_VECTORS - 1) * LANES < dim; column += MOST_VECTORS * LANES)
        weigh(std::integral_constant<int, MOST_VECTORS>(), column);
    for (; column < dim; column += LANES) weigh(std::integral_constant<int, 1>(), column);
}

}  // namespace

template <class T>
void attend(const Layer* layer, const Rows* rows, const int32_t* groups, int64_t num_groups, const int64_t* tables,
            int64_t table_width, const T* query, T* out) {
    const int64_t all = layer->query_heads / layer->kv_heads, parts = (all + LANES - 1) / LANES;
    for_each(num_groups * layer->kv_heads * parts, false, [=](int64_t task) {
        const int32_t* group = groups + task / parts / layer->kv_heads * 3;  // first place in the order, rows, table line
        const int64_t head = task / parts % layer->kv_heads, part = task % parts;
        const int64_t first = all * part / parts, heads = all * (part + 1) / parts - first;
        attend_group(*layer, *rows, rows->order + group[0], group[1], tables + group[2] * table_width, head, head * all + first,
                     heads, query, out);
    });
}

template void attend(const Layer*, const Rows*, const int32_t*, int64_t, const int64_t*, int64_t, const bf16*, bf16*);
template void attend(const Layer*, const Rows*, const int32_t*, int64_t, const int64_t*, int64_t, const float*, float*);

int64_t attend_lanes() { return LANES; }  // queries that are computed side by side

EXPORT(attend_lanes)
EXPORT_TYPES(attend)

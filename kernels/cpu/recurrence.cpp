// Recurrent states, see kernels/recurrence.py. A first pass computes of every row what depends on inputs alone:
// convolution, norms and gates. Then each tile of 16 value columns of a head's matrix goes through the rows of its
// sequence: a tile stays in cache, and a tree is walked depth first with a tile for each level that is still needed.
#include <algorithm>
#include <cmath>
#include <vector>

#include "export.h"
#include "ops.h"
#include "team.h"

namespace {

constexpr int TILE = 16, VECTORS = TILE / LANES;
constexpr int CHAINS = 4;         // sums that are added up side by side: key dimensions by their number modulo 4
constexpr int MOST_KERNEL = 16;   // inputs of a convolution
constexpr int64_t PIECE = 512;    // columns that a thread convolves at a time where there are no heads
constexpr int64_t FEW = 1 << 11;  // columns of rows below which helpers cost more than they save

struct StateRows {
    const int64_t *source, *target, *replayed, *num_replayed, *kept, *extend_start, *node_start, *parents;
    int64_t sequences, depth, nodes;
};

template <class T>
struct LayerStates {
    float *tail, *matrix;
    T* drafted;
    int64_t input_columns;
};

struct Convolution {
    const float *weight, *bias;  // [kernel, columns], newest last; [columns] or null
    int64_t kernel, columns, activated;
};

struct Recurrence {
    const float *decay, *time_bias, *skip;  // skip: null if there is none
    int64_t key_heads, heads, key_dim, value_dim, corrects;
    float shortest, longest;

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return heads * value_dim; }
    // First columns of queries, keys and values.
    int64_t query() const { return corrects ? 0 : values() + keys(); }
    int64_t key() const { return corrects ? keys() : values(); }
    int64_t value() const { return corrects ? 2 * keys() : 0; }
};

template <class T>
struct Row {
    const T* inputs;
    T *y, *drafted;    // results and where inputs are kept, or null
    int64_t before;    // row that stands before it in its text, or -1
    int64_t sequence;
    int64_t from, to;  // levels of the tiles before and after it
};

struct Sequence {
    int64_t first, nodes, end;  // rows: replayed ones and extend rows, then nodes, depth first
};

// The rows of a forward in the order in which tiles go through them.
template <class T>
struct Walk {
    const StateRows& of;
    const LayerStates<T>& states;
    const T* inputs;
    T* y;
    int64_t stride, width;  // of rows of inputs and of y
    std::vector<Row<T>> rows;
    std::vector<Sequence> sequences;
    std::vector<int64_t> child, sibling;  // first child of each node, of the last extend row at first; next sibling
    int64_t levels = 1;

    void add(int64_t sequence, int64_t row, int64_t before, int64_t from, int64_t to) {
        rows.push_back({inputs + row * stride, y + row * width, nullptr, before, sequence, from, to});
    }

    T* kept(int64_t row) const { return states.drafted + row * states.input_columns; }

    void add_sequence(int64_t s) {
        const int64_t first = int64_t(rows.size());
        int64_t before = -1;
        for (int64_t i = 0; i < of.num_replayed[s]; i++, before = int64_t(rows.size()) - 1)
            rows.push_back({kept(of.replayed[s * of.depth + i]), nullptr, nullptr, before, s, 0, 0});
        for (int64_t row = of.extend_start[s]; row < of.extend_start[s + 1]; row++, before = int64_t(rows.size()) - 1)
            add(s, row, before, 0, 0);
        const int64_t nodes = int64_t(rows.size()), count = of.node_start[s + 1] - of.node_start[s];
        const int64_t* parents = of.parents + s * of.nodes;
        child.assign(size_t(count + 1), -1), sibling.assign(size_t(count), -1);
        for (int64_t node = count - 1; node >= 0; node--) {
            int64_t& elder = child[size_t(parents[node] + 1)];
            sibling[size_t(node)] = elder, elder = node;
        }
        add_below(s, -1, before, 0);
        sequences.push_back({first, nodes, int64_t(rows.size())});
    }

    // The subtrees below a node, whose tile is at a level. The last child needs no other tile than its parent's.
    void add_below(int64_t s, int64_t parent, int64_t before, int64_t level) {
        for (int64_t node = child[size_t(parent + 1)]; node >= 0; node = sibling[size_t(node)]) {
            const int64_t own = level + (sibling[size_t(node)] >= 0), row = int64_t(rows.size());
            levels = std::max(levels, own + 1);
            add(s, of.node_start[s] + node, before, level, own);
            if (of.target[s]) rows.back().drafted = kept(of.kept[s] + node);
            add_below(s, node, row, own);
        }
    }
};

// An input on the path of a row: of another row, or kept from a step before.
template <class T>
struct Tap {
    const T* row;
    const float* kept;
};

// The `count` inputs that end with a row's (with the kept ones for -1), newest first.
template <class T>
void take_taps(const Walk<T>& walk, const Convolution& form, int64_t sequence, int64_t row, int64_t count, Tap<T>* taps) {
    const float* kept = walk.states.tail + (walk.of.source[sequence] + 1) * (form.kernel - 1) * form.columns;
    for (int64_t i = 0; i < count; i++)
        if (row >= 0)
            taps[i] = {walk.rows[size_t(row)].inputs, nullptr}, row = walk.rows[size_t(row)].before;
        else
            taps[i] = {nullptr, kept -= form.columns};
}

template <class T>
Vec load_tap(const Tap<T>& tap, int64_t i, int64_t left) {
    return tap.row ? load_end(tap.row + i, left) : load_end(tap.kept + i, left);
}

// Of columns [first, first + count), to the same places of `to`.
template <class T, class Out>
void convolve(const Convolution& form, const Tap<T>* taps, int64_t first, int64_t count, Out* to) {
    for (int64_t i = first; i < first + count; i += LANES) {
        const int64_t left = first + count - i;
        Vec sum = form.bias ? load_end(form.bias + i, left) : Vec{};
        for (int64_t k = 0; k < form.kernel; k++)
            sum = fused(load_end(form.weight + k * form.columns + i, left), load_tap(taps[form.kernel - 1 - k], i, left), sum);
        store_end(to + i, form.activated ? opened(sum, sum) : sum, left);
    }
}

void scale_head(float* x, int64_t dim, float factor) {  // l2 norm times a factor
    const float scale = factor / std::sqrt(square_sum(x, dim) + 1e-6f);
    for (int64_t i = 0; i < dim; i++) x[i] *= scale;
}

// exp(g) of a head, and the factor of what is added to its matrix; exponentials in double precision, so that every
// library's have the same bits.
template <class T>
void open_gates(const Recurrence& form, const T* gates, int64_t head, float* kept, float* factor) {
    const double x = to_float(gates[head]) + form.time_bias[head];
    const float soft = float(std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
    const float time = std::min(std::max(soft, form.shortest), form.longest);
    kept[head] = float(std::exp(double(form.decay[head] * time)));
    factor[head] = form.corrects ? float(1.0 / (1.0 + std::exp(-double(to_float(gates[form.heads + head]))))) : time;
}

// Of one row and the heads that share a key head: to [columns | kept of heads | factors of heads].
template <class T>
void prepare(const Convolution& form, const Recurrence& of, const Tap<T>* taps, int64_t group, float* to) {
    const int64_t shared = of.heads / of.key_heads, keys = group * of.key_dim, values = shared * of.value_dim;
    convolve(form, taps, of.query() + keys, of.key_dim, to);
    convolve(form, taps, of.key() + keys, of.key_dim, to);
    convolve(form, taps, of.value() + group * values, values, to);
    if (of.corrects) {
        scale_head(to + of.query() + keys, of.key_dim, 1.0f / std::sqrt(float(of.key_dim)));
        scale_head(to + of.key() + keys, of.key_dim, 1.0f);
    }
    float* kept = to + form.columns;
    for (int64_t head = group * shared; head < (group + 1) * shared; head++)
        open_gates(of, taps[0].row + form.columns, head, kept, kept + of.heads);
}

// What one row does to a tile [key_dim, TILE], which may be changed in place: kernels/recurrence.py has the formula.
// Compiled once: prompts, plain steps, trees and replays have the same bits.
struct Step {
    const float *query, *key;
    float value[TILE];
    float kept, factor, skip;
    bool corrects;
};

__attribute__((noinline)) void apply(const Step& row, int64_t key_dim, const float* from, float* to, float* y) {
    const int64_t whole = key_dim / CHAINS * CHAINS;
    const float *query = row.query, *key = row.key;
    const Vec kept = splat(row.kept);
    Vec sums[CHAINS][VECTORS] = {}, added[VECTORS];
    if (row.corrects) {
        for (int64_t i = 0; i < whole; i += CHAINS)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    sums[c][v] = fused(splat(key[i + c]), load(from + (i + c) * TILE + v * LANES), sums[c][v]);
        for (int64_t i = whole; i < key_dim; i++)
            for (int v = 0; v < VECTORS; v++)
                sums[0][v] = fused(splat(key[i]), load(from + i * TILE + v * LANES), sums[0][v]);
    }
    for (int v = 0; v < VECTORS; v++) {
        const Vec said = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
        added[v] = fused(-kept, said, load(row.value + v * LANES)) * row.factor;
        for (int c = 0; c < CHAINS; c++) sums[c][v] = Vec{};
    }
    for (int64_t i = 0; i < whole; i += CHAINS)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; c++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const int64_t at = (i + c) * TILE + v * LANES;
                const Vec state = fused(splat(key[i + c]), added[v], kept * load(from + at));
                store(to + at, state);
                sums[c][v] = fused(splat(query[i + c]), state, sums[c][v]);
            }
    for (int64_t i = whole; i < key_dim; i++)
        for (int v = 0; v < VECTORS; v++) {
            const int64_t at = i * TILE + v * LANES;
            const Vec state = fused(splat(key[i]), added[v], kept * load(from + at));
            store(to + at, state);
            sums[0][v] = fused(splat(query[i]), state, sums[0][v]);
        }
    for (int v = 0; v < VECTORS; v++) {
        const Vec sum = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
        store(y + v * LANES, fused(splat(row.skip), load(row.value + v * LANES), sum));
    }
}

// While it lives, denormal numbers are zeros: a state that decays to them would take a hundred times as long.
struct NoDenormals {
#ifdef __SSE__
    const unsigned before = _mm_getcsr();
    NoDenormals() { _mm_setcsr(before | 0x8040); }
    ~NoDenormals() { _mm_setcsr(before); }
#endif
};

// A tile of a head, from `column` on, goes through the rows of a sequence.
template <class T>
struct Tile {
    const Walk<T>& walk;
    const Recurrence& form;
    const float* prepared;
    int64_t columns, head, column;  // columns: of the convolution
    float* levels;

    // Between the tile and a state of the pool.
    template <class Move>
    void move(int64_t state, const Move& move) const {
        float* at = walk.states.matrix + (state * form.heads + head) * form.key_dim * form.value_dim + column;
        for (int64_t i = 0; i < form.key_dim; i++, at += form.value_dim)
            for (int v = 0; v < TILE; v += LANES) move(at + v, levels + i * TILE + v, form.value_dim - column - v);
    }

    void go(int64_t first, int64_t end) const {
        const int64_t keys = head / (form.heads / form.key_heads) * form.key_dim, values = head * form.value_dim + column;
        const int64_t size = form.key_dim * TILE, left = form.value_dim - column;
        for (int64_t i = first; i < end; i++) {
            const Row<T>& row = walk.rows[size_t(i)];
            const float *of = prepared + i * (columns + 2 * form.heads), *gates = of + columns + head;
            Step step{of + form.query() + keys, of + form.key() + keys, {}, *gates, gates[form.heads], 0, form.corrects != 0};
            if (form.skip) step.skip = form.skip[head];
            for (int v = 0; v < TILE; v += LANES) store(step.value + v, load_end(of + form.value() + values + v, left - v));
            float y[TILE];
            apply(step, form.key_dim, levels + row.from * size, levels + row.to * size, y);
            if (row.y)
                for (int v = 0; v < TILE; v += LANES) store_end(row.y + values + v, load(y + v), left - v);
        }
    }

    void run(int64_t number) const {
        [[maybe_unused]] const NoDenormals zeros;
        const Sequence& sequence = walk.sequences[size_t(number)];
        const int64_t target = walk.of.target[number];
        move(walk.of.source[number], [](const float* at, float* tile, int64_t left) { store(tile, load_end(at, left)); });
        go(sequence.first, sequence.nodes);
        if (target) move(target, [](float* at, const float* tile, int64_t left) { store_end(at, load(tile), left); });
        go(sequence.nodes, sequence.end);
    }
};

template <class T>
void prepare_rows(const Walk<T>& walk, const Convolution& form, const Recurrence* of, float* prepared) {
    const int64_t parts = of ? of->key_heads : (form.columns + PIECE - 1) / PIECE, rows = int64_t(walk.rows.size());
    const int64_t lines = form.kernel - 1, sequences = walk.of.sequences;
    for_each(rows * parts + sequences * lines, rows * form.columns <= FEW, [&](int64_t job) {
        Tap<T> taps[MOST_KERNEL];
        if (job < rows * parts) {
            const int64_t number = job / parts, part = job % parts;
            const Row<T>& row = walk.rows[size_t(number)];
            if (row.drafted && part == 0) memcpy(row.drafted, row.inputs, size_t(walk.states.input_columns) * sizeof(T));
            if (!of && !row.y) return;
            take_taps(walk, form, row.sequence, number, form.kernel, taps);
            if (of)
                prepare(form, *of, taps, part, prepared + number * (form.columns + 2 * of->heads));
            else
                convolve(form, taps, part * PIECE, std::min(PIECE, form.columns - part * PIECE), row.y);
            return;
        }
        const int64_t number = (job - rows * parts) / lines, line = (job - rows * parts) % lines;
        const Sequence& sequence = walk.sequences[size_t(number)];
        if (!walk.of.target[number]) return;
        const int64_t last = sequence.nodes > sequence.first ? sequence.nodes - 1 : -1;
        take_taps(walk, form, number, last, lines - line, taps);
        float* to = walk.states.tail + (walk.of.target[number] * lines + line) * form.columns;
        for (int64_t i = 0; i < form.columns; i += LANES)
            store_end(to + i, load_tap(taps[lines - line - 1], i, form.columns - i), form.columns - i);
    });
}

}  // namespace

// `prepared`: [replayed rows and rows, columns + 2 heads] of intermediate results; `form` null: the layer only convolves.
template <class T>
void advance_states(const Convolution* convolution, const Recurrence* form, const LayerStates<T>* states,
                    const StateRows* rows, const T* inputs, int64_t stride, T* y, float* prepared) {
    static thread_local std::vector<Row<T>> kept_rows;
    Walk<T> walk{*rows, *states, inputs, y, stride, form ? form->values() : convolution->columns, {}, {}, {}, {}};
    walk.rows.swap(kept_rows), walk.rows.clear();
    for (int64_t s = 0; s < rows->sequences; s++) walk.add_sequence(s);
    prepare_rows(walk, *convolution, form, prepared);
    if (form) {
        const int64_t tiles = (form->value_dim + TILE - 1) / TILE, units = rows->sequences * form->heads * tiles;
        for_each(units, false, [&](int64_t unit) {
            static thread_local std::vector<float> levels;
            levels.resize(size_t(walk.levels * form->key_dim * TILE + TILE));
            float* aligned = (float*)((uintptr_t(levels.data()) + 63) & ~uintptr_t(63));
            const int64_t head = unit / tiles % form->heads, column = unit % tiles * TILE;
            Tile<T>{walk, *form, prepared, convolution->columns, head, column, aligned}.run(unit / tiles / form->heads);
        });
    }
    walk.rows.swap(kept_rows);
}

// y or its product with silu(gate) is normed in equal groups of `size` columns, see kernels/recurrence.py.
template <class T>
void gated_rms_norm(const T* y, const T* gate, int64_t stride, const T* weight, int64_t shared, float epsilon, int gate_first,
                    T* to, int64_t rows, int64_t groups, int64_t size) {
    for_each(rows * groups, rows * groups * size <= FEW, [=](int64_t unit) {
        static thread_local std::vector<float> x, opening;
        const int64_t group = unit % groups;
        const T *from = y + unit * size, *gates = gate + unit / groups * stride + group * size;
        x.resize(size_t(size)), opening.resize(size_t(size));
        for (int64_t i = 0; i < size; i += LANES) {
            const Vec g = load_end(gates + i, size - i), open = opened(g, g), value = load_end(from + i, size - i);
            store_end(x.data() + i, gate_first ? value * open : value, size - i), store_end(&opening[i], open, size - i);
        }
        const float scale = 1.0f / std::sqrt(square_sum(x.data(), size) / float(size) + epsilon);
        const T* weights = weight + (shared ? 0 : group * size);
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t left = size - i;
            const Vec z = rounded<T>(rounded<T>(load_end(&x[i], left) * scale) * load_end(weights + i, left));
            store_end(to + unit * size + i, gate_first ? z : z * load_end(&opening[i], left), left);
        }
    });
}

#define INSTANCES(T)                                                                                                   \
    template void advance_states(const Convolution*, const Recurrence*, const LayerStates<T>*, const StateRows*, const T*, \
                                 int64_t, T*, float*);                                                                 \
    template void gated_rms_norm(const T*, const T*, int64_t, const T*, int64_t, float, int, T*, int64_t, int64_t, int64_t);
INSTANCES(bf16)
INSTANCES(float)

EXPORT_TYPES(advance_states)
EXPORT_TYPES(gated_rms_norm)

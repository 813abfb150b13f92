// Probabilities of ranks, and the nodes of a draft tree that one forward adds: the ops of kernels/lattice.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "export.h"
#include "growth.h"

namespace {

constexpr int CLASSES = RANK_CLASSES;
constexpr int CLASS_OF_RANK[RANKS] = {0, 1, 1, 1, 2, 2, 2, 2, 2, 2};
constexpr float LEAST = 1e-9f;
constexpr int64_t MAX_DEPTH = 64;

}  // namespace

void spread_classes(const float* logits, const float* logprobs, int64_t rows, int64_t features, float ceiling,
                    float* chances) {
    for (int64_t row = 0; row < rows; row++, logits += CLASSES, logprobs += features, chances += RANKS) {
        const float highest = *std::max_element(logits, logits + CLASSES);
        float share[CLASSES], mass[CLASSES] = {}, total = 0;
        for (int k = 0; k < CLASSES; k++) total += share[k] = std::exp(logits[k] - highest);
        for (int rank = 0; rank < RANKS; rank++) mass[CLASS_OF_RANK[rank]] += chances[rank] = std::exp(logprobs[rank]);
        for (int k = 0; k < CLASSES; k++) share[k] = share[k] / total / std::max(mass[k], LEAST);
        for (int rank = 0; rank < RANKS; rank++)
            chances[rank] = std::min(chances[rank] * share[CLASS_OF_RANK[rank]], ceiling);
    }
}

void grow_lattice(const Origin* from, int64_t batch, int64_t starts, const float* predicted, const float* trust,
                  int64_t block, int64_t ranks, int64_t first_number, float ceiling, float least, const Nodes* nodes,
                  const Picked* picked, int64_t number) {
    const int64_t width = starts * block * ranks;
    std::vector<float> gain(width), uncut(width);
    std::vector<int64_t> order(width);
    for (int64_t b = 0; b < batch; b++) {
        for (int64_t s = 0; s < starts; s++) {
            const int64_t start = b * starts + s;
            const float* own = predicted + start * block * ranks;
            float spine = 1, above = from->survival[start];
            int64_t parent = from->node[start];
            for (int64_t k = 0; k < block; k++) {
                const int64_t depth = from->depth[start] + 1 + k, first = (s * block + k) * ranks;
                auto conditional = [&](int64_t at, int64_t rank) {
                    return std::min(own[at * ranks + rank] * trust[at * ranks + rank], ceiling);
                };
                for (int64_t rank = 0; rank < ranks; rank++) {
                    const int64_t i = b * width + first + rank;
                    const float survival = depth <= MAX_DEPTH ? above * conditional(k, rank) : 0;
                    uncut[first + rank] = gain[first + rank] = survival;
                    nodes->survival[i] = survival >= least ? survival : 0;
                    nodes->parents[i] = parent;
                    nodes->depths[i] = std::min(depth, MAX_DEPTH);
                }
                if (k + 1 < block) gain[first] *= 1 - conditional(k + 1, 0);  // this block continues after it
                spine *= conditional(k, 0);
                above = spine * from->survival[start];
                parent = first_number + first;
            }
        }
        for (int64_t i = 0; i < width; i++) order[i] = i;
        std::partial_sort(order.begin(), order.begin() + number, order.end(), [&](int64_t i, int64_t j) {
            return gain[i] > gain[j] || (gain[i] == gain[j] && i < j);
        });
        for (int64_t k = 0; k < number; k++) {
            const int64_t i = order[k], at = b * width + i, to = b * number + k, position = i / ranks;
            picked->origin.node[to] = first_number + i;
            picked->origin.depth[to] = nodes->depths[at];
            picked->origin.survival[to] = uncut[i];
            picked->tokens[to] = nodes->tokens[at];
            picked->start[to] = position / block;
            picked->position[to] = position % block;
        }
    }
}

EXPORT(spread_classes)
EXPORT(grow_lattice)

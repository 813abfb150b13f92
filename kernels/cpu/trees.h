// Draft trees as arrays, and how the likeliest nodes of a tree become a tree of their own.
#pragma once
#include <cstdint>
#include <vector>

constexpr int64_t ROOT = -1;
using Numbers = std::vector<int64_t>;

struct Trees {  // [batch, width] each, and [batch]
    int64_t *tokens, *parents, *depths;
    float* survival;
    int64_t *num_nodes, width;

    Trees tree(int64_t b) const {
        return {tokens + b * width, parents + b * width, depths + b * width, survival + b * width, num_nodes + b, width};
    }
};

// Those of the first `count` nodes that survive, by falling survival.
Numbers likeliest_first(const Trees& tree, int64_t count);

// Writes the first of these nodes, as many as fit, as a tree; with `leaders` a node's parent is its old parent's leader.
void cut(const Trees& from, const Numbers& nodes, const Numbers* leaders, const Trees& to, int64_t* chosen);

// Whether node j is on the path to node i, itself included, at [b, i, j].
void ancestor_matrix(const int64_t* parents, int64_t batch, int64_t nodes, bool* above);

// Which nodes the committed tokens after the root tried, and which of these nodes they contain.
void fates(const int64_t* tokens, const int64_t* parents, const int64_t* depths, int64_t batch, int64_t width,
                      const int64_t* committed, int64_t longest, const int64_t* counts, bool* tried, bool* came_true);

// Keeps the likeliest nodes; with `merges` each path once.
void merge_trees(const Trees* raw, int64_t batch, int merges, const Trees* merged, int64_t* chosen);

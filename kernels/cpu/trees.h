// Draft trees as arrays, and the one way to cut them.
#pragma once
#include <cstdint>
#include <vector>

constexpr int64_t ROOT = -1;
using Numbers = std::vector<int64_t>;

struct Trees {  // [batch, width] each, and [batch]
    int64_t *tokens, *parents, *depths;
    float* survival;
    int64_t *num_nodes, width;

    Trees line(int64_t b) const {
        return {tokens + b * width, parents + b * width, depths + b * width, survival + b * width, num_nodes + b, width};
    }
};

// Of the first so many nodes those that survive, by falling survival.
Numbers likeliest_first(const Trees& tree, int64_t count);

// The first of these nodes, as many as fit, as a tree; with `leaders` each node hangs below its parent's leader.
void cut(const Trees& from, const Numbers& nodes, const Numbers* leaders, const Trees& to, int64_t* chosen);

// Whether node j is on the path to node i, itself included, at [b, i, j].
extern "C" void ancestor_matrix(const int64_t* parents, int64_t batch, int64_t nodes, bool* above);

// Which nodes were put to the test, and which are on the path of what was committed behind the root.
extern "C" void fates(const int64_t* tokens, const int64_t* parents, const int64_t* depths, int64_t batch, int64_t width,
                      const int64_t* committed, int64_t longest, const int64_t* counts, bool* tried, bool* came_true);

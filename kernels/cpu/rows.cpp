// Extends and trees as rows of one forward, see kernels/rows.py.
#include <algorithm>

#include "export.h"
#include "trees.h"

namespace {

struct Extend {
    int64_t table_row, start, tokens, completes, nodes;
};

struct Nodes {
    const int64_t *slots, *tokens, *parents, *depths;  // [rows]; of trees
};

struct Columns {
    int64_t *tokens, *positions, *sequence, *node, *slots, *table_rows, *ends, *node_slots, *node_depths;
    int64_t *logit_rows, *logit_sequence, *logit_places, *completing, *num_nodes;
    bool* ancestors;
};

// `read`: the concatenated tokens of all extends.
void lay_out_rows(const Extend* extends, int64_t lines, const int64_t* read, int64_t width, const Nodes* nodes, int64_t* table,
                  int64_t table_width, const Columns* columns) {
    int64_t extend_rows = 0, choosing = 0;
    for (int64_t line = 0; line < lines; line++) extend_rows += extends[line].tokens, choosing += extends[line].completes;
    const Columns to = *columns;
    std::fill(to.node_slots, to.node_slots + lines * width, 0);
    std::copy_n(nodes->depths, lines * width, to.node_depths);
    int64_t row = 0, complete = 0, below = extend_rows, logit = choosing;
    for (int64_t line = 0; line < lines; line++) {
        const Extend& extend = extends[line];
        to.table_rows[line] = extend.table_row, to.ends[line] = extend.start + extend.tokens - 1;
        for (int64_t i = 0; i < extend.tokens; i++, row++) {
            to.tokens[row] = read[row], to.positions[row] = extend.start + i, to.sequence[row] = line, to.node[row] = ROOT;
            table[extend.table_row * table_width + extend.start + i] = to.slots[row] = nodes->slots[row];
        }
        for (int64_t i = 0, at = line * width; i < extend.nodes; i++, at++, below++, logit++) {
            to.tokens[below] = nodes->tokens[at], to.positions[below] = to.ends[line] + nodes->depths[at];
            to.sequence[below] = line, to.node[below] = i, to.node_slots[at] = to.slots[below] = nodes->slots[below];
            to.logit_rows[logit] = below, to.logit_sequence[logit] = complete, to.logit_places[logit] = i + 1;
        }
        if (!extend.completes) continue;
        to.logit_rows[complete] = row - 1, to.logit_sequence[complete] = complete, to.logit_places[complete] = 0;
        to.completing[complete] = line, to.num_nodes[complete++] = extend.nodes;
    }
    ancestor_matrix(nodes->parents, lines, width, to.ancestors);
}

}  // namespace

EXPORT(lay_out_rows)

// What a verified step makes permanent, see kernels/settle.py.
#include <algorithm>

#include "export.h"
#include "trees.h"

namespace {

struct Step {
    const int64_t *chosen, *bad, *logit_rows, *logit_sequence, *logit_places, *completing, *num_nodes;
    const int64_t *table_rows, *roots, *node_slots, *slots, *tokens, *parents, *tree_nodes, *sizes;
};

struct Verified {
    int64_t *path, *num_accepted, *bonus, *target_tokens, *tokens, *emitted, *counts;
    int64_t *path_logits, *path_rows, *slots, *table_rows, *roots, *freed;
};

// The first `num_sized` sequences have `numbers` sizes each.
void settle(const Step* step, int64_t logits, int64_t batch, int64_t width, int64_t depth, int64_t num_sized, int64_t numbers,
            int64_t* table, int64_t table_width, const Verified* verified) {
    const int64_t places = width + 1;
    int64_t *targets = verified->target_tokens, *emitted = verified->emitted, *freed = verified->freed;
    Numbers logit_at(batch * places, 0);  // of the root and of each node
    std::fill(targets, targets + batch * places, -1);
    for (int64_t i = 0; i < logits; i++)
        if (step->logit_places[i] < places) {
            const int64_t at = step->logit_sequence[i] * places + step->logit_places[i];
            targets[at] = step->chosen[i], logit_at[at] = i;
        }
    for (int64_t b = 0; b < batch; b++, targets += places) {
        const int64_t line = step->completing[b], root = step->roots[line], *own = &logit_at[b * places];
        const int64_t *tokens = step->tokens + line * width, *parents = step->parents + line * width;
        const int64_t* node_slots = step->node_slots + line * width;
        int64_t *path = verified->path + b * depth, last = ROOT, count = 0;
        for (int64_t i = 0; i < step->tree_nodes[line] && count < depth; i++)  // parents come first
            if (parents[i] == last && tokens[i] == targets[last + 1]) path[count++] = last = i;
        std::fill(path + count, path + depth, ROOT);
        const int64_t bonus = verified->bonus[b] = targets[last + 1];
        verified->num_accepted[b] = count, verified->counts[b] = count + 1;
        verified->table_rows[b] = step->table_rows[line], verified->roots[b] = root;
        int64_t* written = table + step->table_rows[line] * table_width + root + 1;
        int64_t *failed = emitted++, first = b * (depth + 1);
        *failed = 0;
        for (int64_t i = 0; i < numbers; i++) *emitted++ = b < num_sized ? step->sizes[b * numbers + i] : 0;
        for (int64_t k = 0; k <= depth; k++) {
            const int64_t logit = own[k && k <= count ? path[k - 1] + 1 : 0], row = step->logit_rows[logit];
            *failed |= step->bad[logit];
            *emitted++ = verified->tokens[first + k] = k < count ? tokens[path[k]] : k == count ? bonus : -1;
            verified->path_logits[first + k] = logit, verified->path_rows[first + k] = row;
            verified->slots[first + k] = step->slots[row];
            if (k < count) written[k] = node_slots[path[k]];
        }
        for (int64_t i = 0, k = 0; i < step->num_nodes[b]; i++)  // a path's nodes stand in order
            if (k < count && path[k] == i)
                k++;
            else
                *freed++ = node_slots[i];
    }
    std::fill(freed, verified->freed + batch * width, 0);
}

}  // namespace

EXPORT(settle)

// What each row of a forward attends to, for all layers: `Rows` of ops.h, and groups of rows of one sequence.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "export.h"
#include "growth.h"

// Writes for each group (index of its first row in `order`, number of rows, row of the slot table); returns their number.
int64_t plan_rows(const int64_t* sequence, const int64_t* positions, const int64_t* node, int64_t num_rows,
                  const int64_t* table_rows, const int64_t* extend_end, const int64_t* node_slots, const bool* ancestors,
                  int64_t sequences, int64_t nodes, int64_t rows_at_once, int32_t* order, int32_t* seen, int32_t* path_start,
                  int64_t* path_slots, int32_t* groups) {
    std::vector<int64_t> first(sequences + 1);  // index in `order` of each sequence's first row
    int64_t paths = 0, count = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t s = sequence[row];
        first[s + 1]++;
        path_start[row] = int32_t(paths);
        seen[row] = int32_t((node[row] < 0 ? positions[row] : extend_end[s]) + 1);
        if (node[row] < 0) continue;
        const bool* above = ancestors + (s * nodes + node[row]) * nodes;
        for (int64_t i = 0; i <= node[row]; i++)  // parents come first
            if (above[i]) path_slots[paths++] = node_slots[s * nodes + i];
    }
    path_start[num_rows] = int32_t(paths);
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t mine = first[s + 1];
        for (int64_t done = 0; done < mine; done += rows_at_once, count++) {
            groups[3 * count] = int32_t(first[s] + done);
            groups[3 * count + 1] = int32_t(std::min(rows_at_once, mine - done));
            groups[3 * count + 2] = int32_t(table_rows[s]);
        }
        first[s + 1] += first[s];
    }
    for (int64_t row = 0; row < num_rows; row++) order[first[sequence[row]]++] = int32_t(row);
    return count;
}

EXPORT(plan_rows)

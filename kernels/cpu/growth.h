// Structures and ops that the growth of a draft is made of; each stands in the file named above it.
#pragma once
#include <cstdint>

#include "trees.h"

// entries.cpp

struct Entries {
    int64_t *places, *known, *ends, *waiting;
    char* features;
    int64_t* tokens;
    bool* held;
    int64_t positions, entries, room, feature_bytes;  // columns of `places` and of what waits, bytes of one position
};

void take_entries(const Entries* of, const int64_t* rows, int64_t batch, int64_t most, char* features, int64_t* tokens,
                  int64_t* positions, int64_t* slots);
void place_entries(const Entries* of, const int64_t* rows, int64_t batch, const int64_t* positions, const int64_t* slots,
                   int64_t count, const int64_t* scratch, int64_t scratch_stride, int64_t size, int64_t* end, int64_t* live,
                   int64_t* at, int64_t* standing, int64_t* to);

// attention_rows.cpp, tree_attention.cpp

int64_t plan_rows(const int64_t* sequence, const int64_t* positions, const int64_t* node, int64_t num_rows,
                  const int64_t* table_rows, const int64_t* extend_end, const int64_t* node_slots, const bool* ancestors,
                  int64_t sequences, int64_t nodes, int64_t rows_at_once, int32_t* order, int32_t* seen, int32_t* path_start,
                  int64_t* path_slots, int32_t* groups);
int64_t attend_lanes();  // queries that are computed side by side

// sample.cpp, rank_features.cpp

void gumbel_noise(const int32_t* keys, const int32_t* tokens, float* noise, int64_t rows, int64_t count);

constexpr int RANKS = 10, RANK_FEATURES = 15;

template <class T>
void rank_features(const T* scores, int64_t rows, int64_t vocab, float* features, int64_t* ids);

// lattice.cpp

constexpr int RANK_CLASSES = 4;  // the last class is beyond the ranks

struct Origin {  // [batch, starts] each
    int64_t *node, *depth;
    float* survival;
};

struct Picked {
    Origin origin;
    int64_t *tokens, *start, *position;
};

struct Nodes {  // [batch, starts, block, rank] each
    int64_t *tokens, *parents, *depths;
    float* survival;
};

void spread_classes(const float* logits, const float* logprobs, int64_t rows, int64_t features, float ceiling,
                    float* chances);
void grow_lattice(const Origin* from, int64_t batch, int64_t starts, const float* predicted, const float* trust,
                  int64_t block, int64_t ranks, int64_t first_number, float ceiling, float least, const Nodes* nodes,
                  const Picked* picked, int64_t number);

// survival.cpp

struct Proposed {  // the newest tree of each row, [rows, width] each
    int64_t *tokens, *parents, *depths;
    float* predicted;
    int64_t *buckets, width;
};

void keep_proposed(const Proposed* log, const int64_t* rows, int64_t batch, const Trees* trees, const int64_t* chosen,
                   const float* predicted, const int64_t* buckets, int64_t count);

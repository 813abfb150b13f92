// The ops of kernels/entries.py, sequence by sequence.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "export.h"
#include "growth.h"

constexpr int64_t NULL_SLOT = 0;

void add_entries(const Entries* of, const int64_t* rows, const int64_t* starts, const int64_t* counts, int64_t batch,
                 const int64_t* slots, int64_t count, const char* features, const int64_t* tokens) {
    for (int64_t b = 0; b < batch; b++, slots += count) {
        const int64_t row = rows[b];
        const bool follows = of->ends[row] == starts[b];
        int64_t known = follows ? of->known[row] : 0, waiting = follows ? of->waiting[row] : 0;
        for (int64_t k = 0; k < count; k++) {
            const bool exists = k < counts[b];
            const int64_t slot = exists ? slots[k] : NULL_SLOT;
            of->held[slot] = false;
            if (!exists) continue;
            for (int64_t e = 0; e < of->entries; e++)
                of->places[(row * of->positions + known) * of->entries + e] = slot * of->entries + e;
            known++;
            if (!features) continue;
            const int64_t place = row * of->room + waiting++;
            memcpy(of->features + place * of->feature_bytes, features + (b * count + k) * of->feature_bytes,
                   size_t(of->feature_bytes));
            of->tokens[place] = tokens[b * count + k];
        }
        of->known[row] = known, of->waiting[row] = waiting, of->ends[row] = starts[b] + counts[b];
    }
}

void take_entries(const Entries* of, const int64_t* rows, int64_t batch, int64_t most, char* features, int64_t* tokens,
                  int64_t* positions, int64_t* slots) {
    for (int64_t b = 0; b < batch; b++) {
        const int64_t row = rows[b], waiting = of->waiting[row];
        for (int64_t k = 0; k < most; k++, features += of->feature_bytes) {
            const int64_t column = k - (most - waiting), from = row * of->room + std::max<int64_t>(column, 0);
            const int64_t place = row * of->positions + of->known[row] - waiting + column;
            const bool present = column >= 0;
            memcpy(features, of->features + from * of->feature_bytes, size_t(of->feature_bytes));
            *tokens++ = of->tokens[from];
            *positions++ = present ? of->ends[row] - waiting + column : -1;
            *slots = present ? of->places[place * of->entries] / of->entries : NULL_SLOT;
            of->held[*slots++] = true;
        }
        of->waiting[row] = 0;
    }
}

void place_entries(const Entries* of, const int64_t* rows, int64_t batch, const int64_t* positions, const int64_t* slots,
                   int64_t count, const int64_t* scratch, int64_t scratch_stride, int64_t size, int64_t* end, int64_t* live,
                   int64_t* at, int64_t* standing, int64_t* to) {
    const int64_t entries = of->entries, before = (size ? count - 1 : count) * entries;
    for (int64_t b = 0; b < batch; b++, positions += count, slots += count, scratch += scratch_stride) {
        end[b] = std::max<int64_t>((of->known[rows[b]] - (size ? 1 : 0)) * entries - 1, -1);
        for (int64_t i = 0; i < before; i++) {
            *at++ = std::max<int64_t>(end[b] + 1 - before + i, 0);
            *standing++ = std::max<int64_t>(positions[i / entries], 0) + 1 + i % entries;
            *to++ = slots[i / entries] * entries + i % entries;
        }
        for (int64_t i = 0; i < size; i++) {
            *at++ = end[b] + 1 + i;
            *standing++ = std::max<int64_t>(positions[count - 1], 0) + 1 + i;
            *to++ = *live++ = i < entries ? slots[count - 1] * entries + i : scratch[i - entries];
        }
    }
}

EXPORT(add_entries)
EXPORT(take_entries)
EXPORT(place_entries)

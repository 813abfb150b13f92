// Matches of the end of a text in the text itself, and the tree of what followed them.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "trees.h"

namespace {

constexpr int CONTEXT = 16;
constexpr int64_t SEPARATOR = -1, PREDICTED = CONTEXT + 1, SURE = PREDICTED + 3;

struct Match {
    double key;
    int64_t column, strength;
};

// Edges below a value.
int64_t passed(float value, const float* edges, int64_t count) {
    int64_t number = 0;
    while (number < count && value > edges[number]) number++;
    return number;
}

}  // namespace

extern "C" {

void find_matches(const int32_t* table, int64_t width, const int64_t* ends, const int64_t* origins, int64_t* cursors,
                  const int64_t* rows, int64_t batch, int64_t columns, int64_t most, int64_t reach, int64_t* found_columns,
                  int64_t* strengths, int64_t* continuations) {
    std::vector<Match> matches;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t row = rows[b], last = ends[row] - 1, origin = origins[row];
        const int32_t* text = table + row * width;
        matches.clear();
        for (int64_t at = CONTEXT; at < columns - 1; at++) {
            const bool equal = text[at] == text[last];
            const bool guessed = at < origin && (at == cursors[row] || at == cursors[row] - 1);
            if (at == last || !(equal || guessed)) continue;
            const int grade = !equal || text[at - 1] != text[last - 1] ? 1 : text[at - 2] != text[last - 2] ? 2 : 3;
            double near = 3.0 * double(columns) - std::abs(double(at - cursors[row]) - 0.25);
            matches.push_back({(at < origin ? near : double(at)) + grade * 4.0 * double(columns), at, 0});
        }
        const size_t count = std::min(matches.size(), size_t(most));
        std::partial_sort(matches.begin(), matches.begin() + int64_t(count), matches.end(),
                          [](const Match& a, const Match& b) { return a.key > b.key; });
        matches.resize(count);
        for (Match& match : matches) {
            while (match.strength < CONTEXT && text[match.column - match.strength] == text[last - match.strength])
                match.strength++;
            if (match.column < origin) match.strength += PREDICTED;
        }
        std::stable_sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) { return a.strength > b.strength; });
        matches.resize(size_t(most), {0, CONTEXT, 0});
        if (matches[0].strength >= SURE) cursors[row] = matches[0].column;
        for (int64_t m = 0; m < most; m++) {
            const auto [key, column, strength] = matches[size_t(m)];
            const int64_t period = std::max<int64_t>(last - column, 1);
            found_columns[b * most + m] = column, strengths[b * most + m] = strength;
            for (int64_t d = 0; d <= reach; d++) {
                const bool none = strength == 0 || (strength >= PREDICTED && column + d + 2 >= origin);
                continuations[(b * (reach + 1) + d) * most + m] = none ? SEPARATOR : text[column + 1 + d % period];
            }
        }
    }
}

struct Evidence {
    const float *rates, *weights, *rank_weights;
    const int64_t *of_strength, *of_depth;
    const float *share_edges, *vote_edges;
    int64_t buckets, num_share_edges, num_vote_edges, sampled, share, votes;
};

void merge_copies(const int64_t* continuations, const int64_t* strengths, const float* temperatures, int64_t batch,
                  int64_t matches, int64_t reach, const Evidence* known, float least, const Trees* tree, int64_t* buckets) {
    const size_t grid = size_t(reach * matches);
    std::vector<int64_t> parents(grid), depths(grid), first(grid), tokens(grid), chosen(tree->width);
    std::vector<float> survival(grid), through(grid), votes(grid), along(grid), weights(matches);
    const Trees raw = {tokens.data(), parents.data(), depths.data(), survival.data(), nullptr, int64_t(grid)};
    for (int64_t b = 0; b < batch; b++, buckets += grid) {
        const int64_t *mine = continuations + b * (reach + 1) * matches, *strength = strengths + b * matches;
        float total = 0;
        for (int64_t m = 0; m < matches; m++) total += weights[m] = known->weights[strength[m]] * known->rank_weights[m];
        std::fill(through.begin(), through.end(), 0.0f), std::fill(votes.begin(), votes.end(), 0.0f);
        for (int64_t d = 0; d < reach; d++)
            for (int64_t m = 0; m < matches; m++) {
                const int64_t i = d * matches + m, token = mine[i];
                int64_t other = 0;  // the first with the same beginning
                while (mine[d * matches + other] != token || (d && first[i - m + other - matches] != first[i - matches])) other++;
                first[i] = other, tokens[i] = token, depths[i] = d + 1;
                parents[i] = d ? (d - 1) * matches + first[i - matches] : ROOT;
                through[i - m + other] += weights[m], votes[i - m + other] += 1;
            }
        for (int64_t i = 0; i < int64_t(grid); i++) {
            const int64_t d = i / matches, m = i % matches;
            const bool absent = first[i] != m || tokens[i] == SEPARATOR;
            survival[i] = along[i] = 0, buckets[i] = known->buckets - 1;
            if (first[i] != m) continue;
            const float share = through[i] / (d ? through[parents[i]] : total);
            const int64_t bucket = known->of_strength[strength[m]] + known->sampled * (temperatures[b] > 0) +
                                   known->of_depth[d] + known->share * passed(share, known->share_edges, known->num_share_edges) +
                                   known->votes * passed(votes[i], known->vote_edges, known->num_vote_edges);
            along[i] = known->rates[bucket] * (d ? along[parents[i]] : 1.0f);
            if (absent) continue;
            buckets[i] = bucket, survival[i] = along[i] < least ? 0.0f : along[i];
        }
        cut(raw, likeliest_first(raw, raw.width), nullptr, tree->line(b), chosen.data());
    }
}
}

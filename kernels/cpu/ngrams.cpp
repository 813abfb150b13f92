// What followed which tokens, kept as in a cache, and trees of what may follow now: as kernels/ngrams.py.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "trees.h"

namespace {

constexpr int64_t NOTHING = -1, ORDERS = 3, CONTEXT = 4, WAYS = 4, BUCKETS = 2048, CHILDREN = ORDERS * WAYS + 1;
constexpr int TOKEN_BITS = 20, BUCKET_SHIFT = 48;
constexpr int64_t TOKENS = (int64_t(1) << TOKEN_BITS) - 1;

struct Context {
    int64_t tokens[CONTEXT];  // the newest first

    Context then(int64_t token) const {
        Context next{{token}};
        std::copy(tokens, tokens + CONTEXT - 1, next.tokens + 1);
        return next;
    }
};

struct Bucket {
    int64_t tag, place;  // of its first way
};

struct Child {
    float survival;
    int64_t parent, token, bucket;
};

// Edges below a value.
int64_t passed(float value, const float* edges, int64_t count) {
    int64_t number = 0;
    while (number < count && value > edges[number]) number++;
    return number;
}

Context of_tail(const int64_t* tail) {
    Context context;
    std::reverse_copy(tail, tail + CONTEXT, context.tokens);
    return context;
}

}  // namespace

extern "C" {

struct Ngrams {
    int64_t* entries;
    float* counts;
    int64_t* times;
    const int64_t* factors;

    Bucket of(int64_t row, const Context& context, int64_t order) const {
        uint64_t hash = 0;
        for (int64_t age = 0; age < CONTEXT; age++)
            hash += uint64_t(context.tokens[age] + 1) * uint64_t(factors[order * CONTEXT + age]);
        return {int64_t(hash << TOKEN_BITS), (row * BUCKETS + int64_t((hash >> BUCKET_SHIFT) & (BUCKETS - 1))) * WAYS};
    }
};

struct NgramEvidence {
    const float *rates, *share_edges, *count_edges;
    const int64_t* of_depth;
    int64_t num_share_edges, num_count_edges, sampled, kind, share, count, latest, agrees;
};

void add_ngrams(const Ngrams* known, const int64_t* rows, const int64_t* tails, const int64_t* tokens, const int64_t* parents,
                const int64_t* choices, const float* weights, const int64_t* times, int64_t batch, int64_t nodes) {
    std::vector<Context> contexts(size_t(nodes + 1));  // of the root, then of nodes
    for (int64_t b = 0; b < batch; b++) {
        contexts[0] = of_tail(tails + b * CONTEXT);
        for (int64_t n = 0; n <= nodes; n++) {
            if (n) contexts[size_t(n)] = contexts[size_t(parents[b * nodes + n - 1] + 1)].then(tokens[b * nodes + n - 1]);
            const int64_t choice = choices[b * (nodes + 1) + n];
            if (choice < 0) continue;
            for (int64_t order = 0; order < ORDERS; order++) {
                const auto [tag, first] = known->of(rows[b], contexts[size_t(n)], order);
                const int64_t place = first + choice % WAYS, entry = tag | choice;
                if (known->entries[place] != entry) known->entries[place] = entry, known->counts[place] = 0;
                known->counts[place] += weights[b * (nodes + 1) + n];
                known->times[place] = std::max(known->times[place], times[b]);
            }
        }
    }
}

void grow_ngrams(const Ngrams* known, const int64_t* rows, const int64_t* tails, const int64_t* guesses, const bool* stable,
                 const float* temperatures, int64_t batch, int64_t levels, int64_t beam, float least,
                 const NgramEvidence* evidence, const Trees* trees, int64_t* buckets) {
    std::vector<Context> contexts, above;
    std::vector<Child> children;
    for (int64_t b = 0; b < batch; b++) {
        const Trees tree = trees->line(b);
        contexts.assign(1, of_tail(tails + b * CONTEXT));
        std::vector<float> survival(1, 1.0f);
        for (int64_t depth = 0; depth < levels; depth++) {
            const int64_t of_step = evidence->sampled * (temperatures[b] > 0) + evidence->of_depth[depth];
            children.clear();
            for (int64_t n = 0; n < int64_t(contexts.size()); n++) {
                const int64_t guess = n ? NOTHING : guesses[b * levels + depth];
                int64_t siblings[CHILDREN], num_siblings = 0, longest = NOTHING;
                const auto add = [&](int64_t token, int64_t bucket) {
                    if (std::find(siblings, siblings + num_siblings, token) != siblings + num_siblings) return;
                    siblings[num_siblings++] = token;
                    const float chance = evidence->rates[bucket] * survival[size_t(n)];
                    if (chance >= least) children.push_back({chance, n, token, bucket});
                };
                for (int64_t order = 0; order < ORDERS; order++) {
                    const auto [tag, first] = known->of(rows[b], contexts[size_t(n)], order);
                    float total = 0;
                    int64_t latest = 0;
                    bool is_known[WAYS];
                    for (int64_t way = 0; way < WAYS; way++) {
                        is_known[way] = (known->entries[first + way] & ~TOKENS) == tag;
                        if (!is_known[way]) continue;
                        total += known->counts[first + way];
                        latest = std::max(latest, known->times[first + way]);
                    }
                    if (total <= 0) continue;
                    if (longest < 0) longest = order;
                    for (int64_t way = 0; way < WAYS; way++) {
                        if (!is_known[way]) continue;
                        const int64_t token = known->entries[first + way] & TOKENS;
                        const float count = known->counts[first + way];
                        add(token, of_step + (longest + ORDERS * order) * evidence->kind +
                                       passed(count / total, evidence->share_edges, evidence->num_share_edges) * evidence->share +
                                       passed(count, evidence->count_edges, evidence->num_count_edges) * evidence->count +
                                       (known->times[first + way] == latest) * evidence->latest +
                                       (token == guess) * evidence->agrees);
                    }
                }
                if (guess >= 0)
                    add(guess, of_step + ORDERS * ORDERS * evidence->kind + stable[b * levels + depth] * evidence->latest);
            }
            std::stable_sort(children.begin(), children.end(), [](const Child& x, const Child& y) { return x.survival > y.survival; });
            children.resize(std::min(children.size(), size_t(beam)));
            std::swap(contexts, above);
            contexts.clear(), survival.clear();
            for (int64_t n = 0; n < beam; n++) {
                const int64_t at = depth * beam + n;
                const bool exists = n < int64_t(children.size());
                const Child child = exists ? children[size_t(n)] : Child{0.0f, 0, 0, 0};
                tree.tokens[at] = child.token, tree.depths[at] = depth + 1, tree.survival[at] = child.survival;
                tree.parents[at] = depth ? (depth - 1) * beam + child.parent : ROOT;
                buckets[b * levels * beam + at] = child.bucket;
                if (!exists) continue;
                contexts.push_back(above[size_t(child.parent)].then(child.token)), survival.push_back(child.survival);
            }
        }
    }
}
}

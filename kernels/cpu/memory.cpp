// N-gram counts, and trees grown from them and a network's proposals: the ops of kernels/memory.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "export.h"
#include "gumbel.h"
#include "trees.h"

namespace {

constexpr int ORDERS[] = {1, 2, 4, 8}, NUM_ORDERS = 4, CONTEXT = 8, WAYS = 8, MAX_DEPTH = 64;
constexpr int TEXT = 0, PREDICTION = 1, PAST = 2, PARTS = 3, VARIANTS = 4, NO_PARENT = -2;
constexpr int TOKEN_BITS = 20, COUNT_BITS = 16, TAG_BITS = 28, TAG_PLACE = 64 - TAG_BITS, BUCKET_SHIFT = 40, TAG_SHIFT = 12;
constexpr uint64_t TAGS = (uint64_t(1) << TAG_BITS) - 1, TOKENS = (uint64_t(1) << TOKEN_BITS) - 1;
constexpr uint64_t MOST = (uint64_t(1) << COUNT_BITS) - 1, SIGHTING = 16, AFTER_REJECTED = SIGHTING / 4;
constexpr int SHARES = 6, TOTALS = 6, LENGTHS = NUM_ORDERS + 1, CLAIMS = 18, STRENGTHS = 4;
constexpr int OF_SHARE = NUM_ORDERS * SHARES + 1, OF_KNOWN = LENGTHS * LENGTHS, OF_PART = OF_SHARE + OF_KNOWN + TOTALS + 1;
constexpr int OF_CLAIM = CLAIMS * STRENGTHS * STRENGTHS, NOISES = 13;
constexpr int GROUPS = 3 * PARTS + 2, FEATURES = PARTS * OF_PART + OF_CLAIM + NOISES;
constexpr float LEAST = 0.005f, LIKELIEST = 0.98f;

int passed(float value, std::initializer_list<float> edges) {
    return int(std::count_if(edges.begin(), edges.end(), [value](float edge) { return value > edge; }));
}

struct Context {
    int64_t tokens[CONTEXT];  // the newest first

    Context then(int64_t token) const {
        Context next{{token}};
        std::copy(tokens, tokens + CONTEXT - 1, next.tokens + 1);
        return next;
    }
};

struct Place {
    int64_t first;  // entry of its bucket
    uint64_t tag;
};

struct Sighting {
    int order = -1;
    float count = 0, total = 0;

    float share() const { return total > 0 ? count / total : 0; }
    int strength() const { return order < 0 ? 0 : 1 + passed(share(), {0.34f, 0.9f}); }
};

struct Candidate {
    int64_t token, node = -1;
    float claim = 0;
    Sighting seen[PARTS] = {};
    int features[GROUPS] = {};
};

using Candidates = std::vector<Candidate>;

Candidate& of_token(Candidates& candidates, int64_t token) {
    for (Candidate& one : candidates)
        if (one.token == token) return one;
    return candidates.emplace_back(Candidate{token});
}

struct Node {
    int64_t token, parent, depth, proposed;  // proposed: of the network's tree, ROOT for the root, NO_PARENT for none
    float survival;
    Context context;
};

struct Memory {
    int64_t* entries;  // [buckets, WAYS]
    float *weights, *squares;  // [scopes, VARIANTS, FEATURES]
    const int64_t *parts, *scopes;  // [rows, PARTS, 2], [rows]
    const bool *warm, *stores;  // [rows]
    int64_t *tails, *predicted;  // [rows, CONTEXT], [rows]
    const int64_t *seeds, *roots;  // [rows]
    Trees alone, network;  // [rows, nodes]
    const int64_t* factors;  // [NUM_ORDERS + CONTEXT]
};

// One row's view of the memory.
struct Reader {
    const Memory& memory;
    const int64_t row;
    const Trees network;

    Reader(const Memory* of, int64_t number) : memory(*of), row(number), network(of->network.tree(number)) {}

    int64_t buckets(int part) const { return memory.parts[(row * PARTS + part) * 2 + 1]; }

    Context tail() const {
        Context context;
        std::copy_n(memory.tails + row * CONTEXT, CONTEXT, context.tokens);
        return context;
    }

    void set_tail(const Context& context) const { std::copy_n(context.tokens, CONTEXT, memory.tails + row * CONTEXT); }

    // Finds the bucket of each order's context; returns for how many orders the sequence is long enough.
    int places(const Context& context, int part, Place* found) const {
        const int64_t first = memory.parts[(row * PARTS + part) * 2], count = buckets(part);
        uint64_t hash = 0;
        for (int order = 0, age = 0; order < NUM_ORDERS; order++) {
            if (!count || context.tokens[ORDERS[order] - 1] < 0) return order;
            for (; age < ORDERS[order]; age++) hash += uint64_t(context.tokens[age] + 1) * uint64_t(memory.factors[NUM_ORDERS + age]);
            const uint64_t own = hash + uint64_t(memory.factors[order]);
            found[order] = {(first + int64_t(own >> BUCKET_SHIFT & uint64_t(count - 1))) * WAYS, own >> TAG_SHIFT & TAGS};
            __builtin_prefetch(memory.entries + found[order].first);
        }
        return NUM_ORDERS;
    }

    void add(const Context& context, int part, int64_t token, uint64_t sighting = SIGHTING) const {
        Place found[NUM_ORDERS];
        const int orders = places(context, part, found);
        for (int order = 0; order < orders; order++) {
            uint64_t* entries = reinterpret_cast<uint64_t*>(memory.entries) + found[order].first;
            const uint64_t name = found[order].tag << TAG_PLACE | uint64_t(token) << COUNT_BITS;
            int known = -1, rarest = 0;
            for (int way = 0; way < WAYS; way++) {
                const uint64_t count = entries[way] & MOST;
                if ((entries[way] & ~MOST) == name && count) known = way;
                if (count < (entries[rarest] & MOST)) rarest = way;
            }
            if (known >= 0) {
                entries[known] = name | std::min(MOST, (entries[known] & MOST) + sighting);
                continue;
            }
            if (entries[rarest] & MOST)
                for (int way = 0; way < WAYS; way++) entries[way] -= (entries[way] & MOST) >> 3;
            entries[rarest] = name | sighting;
        }
    }

    // Adds the tokens that the part has counted after the context; returns the longest order with any, or -1.
    int see(const Context& context, int part, Candidates& candidates) const {
        Place found[NUM_ORDERS];
        int longest = -1;
        for (int order = places(context, part, found) - 1; order >= 0; order--) {
            const uint64_t* entries = reinterpret_cast<const uint64_t*>(memory.entries) + found[order].first;
            uint64_t total = 0;
            for (int way = 0; way < WAYS; way++)
                if (entries[way] >> TAG_PLACE == found[order].tag) total += entries[way] & MOST;
            if (!total) continue;
            longest = std::max(longest, order);
            for (int way = 0; way < WAYS; way++) {
                const uint64_t count = entries[way] & MOST;
                if (entries[way] >> TAG_PLACE != found[order].tag || !count) continue;
                Sighting& seen = of_token(candidates, int64_t(entries[way] >> COUNT_BITS & TOKENS)).seen[part];
                if (seen.order < 0) seen = {order, float(count) / SIGHTING, float(total) / SIGHTING};
            }
        }
        return longest;
    }

    bool knows(int64_t proposed) const {
        int64_t* const end = network.parents + *network.num_nodes;
        return proposed != NO_PARENT && std::find(network.parents, end, proposed) != end;
    }

    // Leading zeros of the hash of a token's sampling noise (kernels/sample.py): each adds log 2 to the noise.
    static int noise(uint64_t key, int64_t token) {
        const uint32_t bits = noise_bits(key, uint32_t(token));
        return bits >> 30 == 3 ? 1 : std::min(bits ? 2 + __builtin_clz(bits) : NOISES, NOISES - 1);
    }

    // The candidates for the next token at a depth, with the features of each.
    void candidates(const Context& context, int64_t proposed, bool knows, int64_t depth, Candidates& found) const {
        int known[PARTS];
        found.clear();
        for (int part = 0; part < PARTS; part++) known[part] = see(context, part, found);
        bool claims = false;
        for (int64_t node = 0; node < *network.num_nodes; node++) {
            const int64_t parent = network.parents[node];
            if (knows ? parent != proposed : network.depths[node] != depth) continue;
            Candidate& one = of_token(found, network.tokens[node]);
            one.claim = std::max(one.claim, network.survival[node] / (parent < 0 ? 1.0f : network.survival[parent]));
            if (knows) one.node = node;
            claims = true;
        }
        const bool draws = memory.warm[row];
        const uint64_t key = noise_key(memory.seeds[row], memory.roots[row] + depth);
        for (Candidate& one : found) {
            int *feature = one.features, base = 0;
            for (int part = 0; part < PARTS; part++, base += OF_PART) {
                const Sighting& seen = one.seen[part];
                const int shared = seen.order * SHARES + passed(seen.share(), {0.15f, 0.34f, 0.6f, 0.9f, 0.99f});
                *feature++ = base + (seen.order < 0 ? OF_SHARE - 1 : shared);
                *feature++ = base + OF_SHARE + (known[part] + 1) * LENGTHS + seen.order + 1;
                const int total = seen.order < 0 ? TOTALS : passed(seen.total, {1.5f, 2.5f, 4.5f, 9.5f, 30.0f});
                *feature++ = base + OF_SHARE + OF_KNOWN + total;
            }
            const float odds = one.claim / std::max(1e-6f, 1.0f - one.claim);
            const int level = one.claim <= 0 ? 0 : std::clamp(int(std::floor(std::log2(odds))) + 10, 0, CLAIMS - 3);
            const int claim = !claims ? 0 : one.claim <= 0 ? 1 : 2 + level;
            const int own = std::max(one.seen[TEXT].strength(), one.seen[PREDICTION].strength());
            *feature++ = base + (claim * STRENGTHS + own) * STRENGTHS + one.seen[PAST].strength();
            *feature = base + OF_CLAIM + (draws && one.claim <= 0 ? noise(key, one.token) : 0);
        }
    }

    int64_t variant(bool knows) const { return (memory.scopes[row] * VARIANTS + 2 * memory.warm[row] + knows) * FEATURES; }

    float chance(int64_t variant, const Candidate& one) const {
        float sum = 0;
        for (int feature : one.features) sum += memory.weights[variant + feature];
        return std::clamp(1.0f / (1.0f + std::exp(-sum)), LEAST, LIKELIEST);
    }
};

void copy(const Trees& from, const Trees& to) {
    const int64_t count = *to.num_nodes = std::min(*from.num_nodes, to.width);
    std::copy_n(from.tokens, count, to.tokens);
    std::copy_n(from.parents, count, to.parents);
    std::copy_n(from.depths, count, to.depths);
    std::copy_n(from.survival, count, to.survival);
}

// Number of leading tokens that the tree has as a path from its root.
int64_t matching(const Trees& tree, const int64_t* tokens, int64_t count) {
    int64_t parent = ROOT;
    for (int64_t depth = 0; depth < count; depth++) {
        int64_t node = 0;
        while (node < *tree.num_nodes && (tree.parents[node] != parent || tree.tokens[node] != tokens[depth])) node++;
        if (node == *tree.num_nodes) return depth;
        parent = node;
    }
    return count;
}

// A tree that grows best first: the likeliest node that was not expanded yet goes on. It holds the likeliest nodes so far; a
// better one takes the place of the least likely, which has no child among them, for a child is less likely than its parent.
struct Tree {
    const size_t most;
    std::vector<Node> nodes;
    std::vector<char> expanded;
    Candidates found;

    explicit Tree(int64_t width) : most(size_t(width)) {}

    void grow(const Reader& reader, float least) {
        nodes.clear(), expanded.clear();
        Node parent{-1, ROOT, 0, ROOT, 1.0f, reader.tail()};
        for (int64_t number = ROOT;;) {
            if (parent.depth < MAX_DEPTH) expand(reader, parent, number, least);
            number = ROOT;
            for (size_t i = 0; i < nodes.size(); i++)
                if (!expanded[i] && (number == ROOT || nodes[i].survival > nodes[size_t(number)].survival)) number = int64_t(i);
            if (number == ROOT) return;
            expanded[size_t(number)] = true;
            parent = nodes[size_t(number)];
        }
    }

    void expand(const Reader& reader, const Node& parent, int64_t number, float least) {
        const bool knows = reader.knows(parent.proposed);
        reader.candidates(parent.context, parent.proposed, knows, parent.depth + 1, found);
        const int64_t variant = reader.variant(knows);
        for (const Candidate& one : found) {
            const float survival = parent.survival * reader.chance(variant, one);
            if (survival < least) continue;
            size_t place = nodes.size();
            if (place == most) {
                const auto rarer = [](const Node& a, const Node& b) { return a.survival < b.survival; };
                place = size_t(std::min_element(nodes.begin(), nodes.end(), rarer) - nodes.begin());
                if (survival <= nodes[place].survival) continue;
            } else {
                nodes.emplace_back(), expanded.push_back(false);
            }
            nodes[place] = {one.token, number, parent.depth + 1, one.node < 0 ? NO_PARENT : one.node, survival, parent.context.then(one.token)};
            expanded[place] = false;
        }
    }

    void write(const Trees& to) const {
        Numbers order(nodes.size()), numbers(nodes.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return nodes[size_t(a)].survival > nodes[size_t(b)].survival; });
        *to.num_nodes = int64_t(order.size());
        for (int64_t i = 0; i < to.width; i++) {
            const bool exists = i < *to.num_nodes;
            const Node node = exists ? nodes[size_t(order[size_t(i)])] : Node{0, ROOT, 0, ROOT, 0.0f, {}};
            if (exists) numbers[size_t(order[size_t(i)])] = i;
            to.tokens[i] = node.token;
            to.parents[i] = node.parent == ROOT ? ROOT : numbers[size_t(node.parent)];
            to.depths[i] = node.depth;
            to.survival[i] = node.survival;
        }
    }
};

void add_text(const Memory* memory, int64_t row, int64_t part, const int64_t* tokens, int64_t count) {
    const Reader reader(memory, row);
    Context context = reader.tail();
    for (int64_t i = 0; i < count; i++) {
        reader.add(context, int(part), tokens[i]);
        context = context.then(tokens[i]);
    }
    if (part == TEXT) reader.set_tail(context);
}

void grow_joint_tree(const Memory* memory, const int64_t* rows, int64_t batch, const Trees* network, float least, const Trees* trees) {
    Tree tree(trees->width);
    for (int64_t b = 0; b < batch; b++) {
        const Reader reader(memory, rows[b]);
        *reader.network.num_nodes = 0;
        if (network) copy(network->tree(b), reader.network);
        tree.grow(reader, least);
        tree.write(trees->tree(b));
        if (!network) copy(trees->tree(b), memory->alone.tree(rows[b]));
    }
}

void learn_committed(const Memory* memory, const int64_t* rows, int64_t batch, const int64_t* tokens, int64_t width,
                     const int64_t* counts, const Trees* verified, const int64_t* choices, float rate, int64_t* sums) {
    Candidates found;
    std::vector<Context> contexts;
    std::vector<char> is_accepted;
    int64_t* const known = sums + 4;  // by order
    std::fill_n(sums, 4 + NUM_ORDERS, 0);
    for (int64_t b = 0; b < batch; b++) {
        const Reader reader(memory, rows[b]);
        const int64_t* committed = tokens + b * width;
        const int64_t most = std::max<int64_t>(0, counts[b] - 1);
        sums[0] += matching(memory->alone.tree(rows[b]), committed, most), sums[1] += most, sums[2] += counts[b];
        if (memory->stores[rows[b]] && reader.buckets(PAST)) sums[3] += counts[b];
        const Context tail = reader.tail();
        Context context = tail;
        int64_t proposed = *reader.network.num_nodes ? ROOT : NO_PARENT;
        for (int64_t i = 0; i < counts[b]; i++) {
            const bool knows = reader.knows(proposed);
            reader.candidates(context, proposed, knows, i + 1, found);
            const int64_t variant = reader.variant(knows);
            proposed = NO_PARENT;
            for (const Candidate& one : found) {
                const bool is_true = one.token == committed[i];
                const float error = float(is_true) - reader.chance(variant, one);
                for (int feature : one.features) {
                    if (!memory->stores[rows[b]]) break;
                    float& square = memory->squares[variant + feature];
                    square += error * error;
                    memory->weights[variant + feature] += rate * error / std::sqrt(square);
                }
                if (!is_true) continue;
                if (one.node >= 0) proposed = one.node;
                memory->predicted[rows[b]] += one.seen[PREDICTION].order > 0;
                if (one.seen[PAST].order >= 0) known[one.seen[PAST].order]++;
            }
            for (int part : {TEXT, PAST})
                if (part == TEXT || memory->stores[rows[b]]) reader.add(context, part, committed[i]);
            context = context.then(committed[i]);
        }
        reader.set_tail(context);
        const Trees tree = verified->tree(b);
        const int64_t* chosen = choices + b * (verified->width + 1) + 1;
        contexts.resize(size_t(*tree.num_nodes)), is_accepted.resize(contexts.size());
        for (int64_t node = 0; node < *tree.num_nodes; node++) {
            const int64_t parent = tree.parents[node];
            contexts[size_t(node)] = (parent < 0 ? tail : contexts[size_t(parent)]).then(tree.tokens[node]);
            is_accepted[size_t(node)] = (parent < 0 || is_accepted[size_t(parent)]) && chosen[parent] == tree.tokens[node];
            if (!is_accepted[size_t(node)]) reader.add(contexts[size_t(node)], TEXT, chosen[node], AFTER_REJECTED);
        }
        *reader.network.num_nodes = *memory->alone.tree(rows[b]).num_nodes = 0;
    }
}

}  // namespace

EXPORT(add_text)
EXPORT(grow_joint_tree)
EXPORT(learn_committed)

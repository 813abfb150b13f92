#include "team.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "export.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t MOST_THREADS = 1024;
constexpr int64_t PIECES = 4;  // of a thread's range: nobody waits longer than for a quarter of it
// How long a helper looks for work before it sleeps: about what it costs to be woken, so that waiting at most doubles it.
constexpr Clock::duration PATIENCE = std::chrono::microseconds(50);
thread_local int64_t width = 1;  // threads that work for this thread, itself included

struct alignas(64) Range {  // a share of the loop, of which others take pieces when they have done their own
    // Its pieces in the upper half, the next one in the lower half: one word, so that who takes one knows whether it is one.
    std::atomic<uint64_t> ticket{0};

    bool has_work() const { return is_piece(ticket); }
    bool take(int64_t* number, int64_t* pieces) {
        if (!has_work()) return false;
        const uint64_t mine = ticket.fetch_add(1);
        *pieces = int64_t(mine >> 32), *number = uint32_t(mine);
        return is_piece(mine);
    }
    static bool is_piece(uint64_t word) { return uint32_t(word) < word >> 32; }
};

struct Team {
    Range ranges[MOST_THREADS];
    alignas(64) const void* body;
    Piece piece;
    int64_t count, parts;
    alignas(64) std::atomic<int64_t> done{0};  // pieces
    alignas(64) std::atomic<int> asleep{0};    // helpers
    std::mutex busy, door;
    std::condition_variable bell;
    int64_t helpers = 0;

    // Runs pieces of a range until there are none; returns how many.
    int64_t run_range(int64_t part) {
        int64_t number, pieces, taken = 0;
        for (; ranges[part].take(&number, &pieces); taken++) {
            const int64_t all = parts * pieces, at = part * pieces + number;
            piece(body, count * at / all, count * (at + 1) / all);
        }
        return taken;
    }

    // Runs the own range first. Until a piece is taken the loop may be over, and its description be that of the next.
    bool take_part(int64_t own) {
        int64_t taken = run_range(own);
        if (!taken) return false;
        for (int64_t i = 1, others = parts; i < others; i++) taken += run_range((own + i) % others);
        done.fetch_add(taken, std::memory_order_release);
        return true;
    }

    void help(int64_t own) {
        for (;;) {
            for (Clock::time_point until = Clock::now() + PATIENCE; Clock::now() < until;)
                if (take_part(own))
                    until = Clock::now() + PATIENCE;
                else
                    std::this_thread::yield();  // to any other thread of the machine
            std::unique_lock<std::mutex> lock(door);
            asleep++;
            bell.wait(lock, [&] { return ranges[own].has_work(); });
            asleep--;
        }
    }

    void run(int64_t total, const void* with, Piece each) {
        for (; helpers < width - 1; helpers++) std::thread(&Team::help, this, helpers + 1).detach();
        body = with, piece = each, count = total, parts = std::min(total, width);
        const int64_t pieces = std::min(PIECES, total / parts);
        done.store(0, std::memory_order_relaxed);
        for (int64_t part = parts; part-- > 0;) ranges[part].ticket = uint64_t(pieces) << 32;
        if (asleep) {
            std::lock_guard<std::mutex> lock(door);
            bell.notify_all();
        }
        take_part(0);
        while (done.load(std::memory_order_acquire) < parts * pieces) std::this_thread::yield();
    }
};

Team* team = new Team;  // never destroyed: its helpers run until the process ends

// A forked process has none of the helpers.
[[maybe_unused]] const int forgets = pthread_atfork(nullptr, nullptr, [] { team = new Team; });

int64_t use_threads(int64_t number) { return width = std::min(number, MOST_THREADS); }

}  // namespace

int64_t threads_in_use() { return width; }

void divide(int64_t count, const void* body, Piece piece) {
    std::unique_lock<std::mutex> mine(team->busy, std::defer_lock);
    if (width > 1 && count > 1 && mine.try_lock())
        team->run(count, body, piece);
    else
        piece(body, 0, count);
}

EXPORT(use_threads)
EXPORT(threads_in_use)

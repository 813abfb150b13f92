// Divides a loop among the calling thread and helper threads that all kernels share. Pieces are taken, not assigned: who
// calls never waits for a helper that has not begun, so that another program on the processor delays no more than one piece.
#pragma once
#include <cstdint>

using Piece = void (*)(const void* body, int64_t first, int64_t last);

// Threads that compute for the calling one, itself included.
int64_t threads_in_use();

// Calls piece(body, first, last) for ranges that cover [0, count), and returns when all have been run.
void divide(int64_t count, const void* body, Piece piece);

// Calls body(i) for each i in [0, count), in any order; without helpers where the loop is too `short_` to gain by them.
template <class Body>
void for_each(int64_t count, bool short_, const Body& body) {
    const Piece piece = [](const void* called, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) (*static_cast<const Body*>(called))(i);
    };
    if (short_)
        piece(&body, 0, count);
    else
        divide(count, &body, piece);
}

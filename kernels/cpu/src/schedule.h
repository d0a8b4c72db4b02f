// Loops over equal pieces of work. Each thread takes the pieces of its range in order, so that it can prefetch the next piece. It then
// takes pieces from the other ranges, so that a thread without a core does not delay the loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace rootstock {

struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
};

// Returns the number of the calling thread in its team, from 0 on.
inline int thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Calls work(index, last) once for each index below count, on any thread. `last` is the end of the range that contains `index`.
template <typename Work> void for_each_piece(int64_t count, int threads, Work&& work) {
    const int team = static_cast<int>(std::min<int64_t>(threads, count));
    if (team <= 1) {
        for (int64_t index = 0; index < count; ++index) work(index, count);
        return;
    }
    std::vector<Range> ranges(team);
    for (int t = 0; t < team; ++t) {
        ranges[t].next = count * t / team;
        ranges[t].end = count * (t + 1) / team;
    }
#pragma omp parallel num_threads(team)
    {
        const int self = thread_number();
        for (int turn = 0; turn < team; ++turn) {
            Range& range = ranges[(self + turn) % team];
            for (int64_t index; (index = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) {
                work(index, range.end);
            }
        }
    }
}

}  // namespace rootstock

// A schedule in time, and the bound of one machine.
#pragma once

#include <limits>
#include <numeric>
#include <queue>
#include <tuple>

#include "numbers.hpp"

namespace dynapipe {

using Step = std::tuple<i64, i64, i64, i64>;  // slot that must be filled, duration, slot that is filled, delay
using Spans = std::vector<std::vector<std::pair<i64, i64>>>;

// A rank runs until its next input is not there, and is looked at again when that slot is filled. The first slot is full.
inline std::pair<Spans, std::vector<std::pair<int, int>>> run_steps(const std::vector<std::vector<Step>>& ranks, i64 slots) {
  const int count = static_cast<int>(ranks.size());
  std::vector<i64> arrival(slots, -1), clock(count, 0);
  std::vector<int> waiter(slots, -1), runnable(count);
  if (slots > 0) arrival[0] = 0;
  Spans spans(count);
  std::iota(runnable.begin(), runnable.end(), 0);
  while (!runnable.empty()) {
    const int rank = runnable.back();
    runnable.pop_back();
    auto& done = spans[rank];
    i64 now = clock[rank];
    while (done.size() < ranks[rank].size()) {
      const auto [need, duration, out, delay] = ranks[rank][done.size()];
      if (arrival[need] < 0) {
        waiter[need] = rank;
        break;
      }
      const i64 start = std::max(now, arrival[need]);
      now = start + duration;
      done.emplace_back(start, now);
      arrival[out] = now + delay;
      if (waiter[out] >= 0) {
        runnable.push_back(waiter[out]);
        waiter[out] = -1;
      }
    }
    clock[rank] = now;
  }
  std::vector<std::pair<int, int>> stuck;
  for (int rank = 0; rank < count; ++rank) {
    if (spans[rank].size() < ranks[rank].size()) stuck.emplace_back(rank, static_cast<int>(spans[rank].size()));
  }
  return {std::move(spans), std::move(stuck)};
}

// Returns the least possible max(end + tail) over preemptive orders of jobs on one machine: always run the largest tail.
inline i64 bound_machine_ns(const i64* heads, const i64* durations, const i64* tails, std::size_t count) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return heads[a] < heads[b]; });
  std::priority_queue<std::pair<i64, i64>> ready;  // tail, time left
  i64 now = 0, best = 0;
  const auto run_until = [&](i64 head) {
    while (!ready.empty() && now < head) {
      const auto [tail, left] = ready.top();
      ready.pop();
      if (now + left > head) {
        ready.emplace(tail, now + left - head);
        now = head;
      } else {
        now += left;
        best = std::max(best, now + tail);
      }
    }
  };
  for (std::size_t job : order) {
    run_until(heads[job]);
    now = std::max(now, heads[job]);
    ready.emplace(tails[job], durations[job]);
  }
  run_until(std::numeric_limits<i64>::max());
  return best;
}

}  // namespace dynapipe

// Cuts and replicas made even by what every rank has to do, before an order is simulated.
#pragma once

#include "moves.hpp"

namespace dynapipe {

class Levelling : private Moves {
 public:
  Levelling(const Machine& machine, Costs costs, bool equal_counts)
      : Moves(std::move(costs), 1, equal_counts, false), ranks_(machine.ranks), ways_(static_cast<std::size_t>(costs_.shapes) * ranks_), total_(costs_.shapes, 0),
        work_(ranks_) {
    for (int shape = 0; shape < costs_.shapes; ++shape) {
      machine.measure(costs_.records + static_cast<std::size_t>(shape) * machine.stages * kFields, ways_of(shape));
      for (int r = 0; r < ranks_; ++r) total_[shape] += ways_of(shape)[r].work;
    }
  }

  // Record-to-record travel (Dueck 1993), as in the search; returns the best state.
  State improve(State start, i64 moves, std::uint64_t seed) {
    const int replicas = static_cast<int>(start.groups.size());
    for (int d = 0; d < replicas; ++d) start.makespan[d] = time_of(start, d);
    std::vector<int> types{kShift, kShift, kShift, kShift, kDivide, kDivide};
    if (replicas > 1) types.insert(types.end(), {kGive, kExchange});
    begin(std::move(start), seed, std::move(types));
    for (i64 step = 0; step < moves; ++step) {
      if (!try_move()) continue;
      for (const auto& saved : groups_before_) makespans_.set(saved.replica, time_of(state_, saved.replica));
      const Value now = value();
      if (energy(now) <= record_ + record_ / 4096 * (moves - step) / moves) {
        accept(now);
      } else {
        undo();
      }
    }
    return best_;
  }

 private:
  static constexpr i64 kLargest = 3;

  Way* ways_of(int shape) { return &ways_[static_cast<std::size_t>(shape) * ranks_]; }

  // About how long a good order of a replica's cuts takes that has the cheapest first and the next one last.
  i64 time_of(const State& state, int d) {
    const auto& group = state.groups[d];
    if (group.empty()) return 0;
    std::fill(work_.begin(), work_.end(), 0);
    std::pair<i64, int> first{kNever, 0}, second{kNever, 0};
    i64 largest = 0;
    for (int m : group) {
      const int shape = shape_of(state.cuts[m]);
      const Way* const ways = ways_of(shape);
      for (int r = 0; r < ranks_; ++r) work_[r] += ways[r].work;
      const std::pair<i64, int> mine{total_[shape], shape};
      largest = std::max(largest, mine.first);
      if (mine < first) {
        second = first;
        first = mine;
      } else if (mine < second) {
        second = mine;
      }
    }
    const int last = group.size() == 1 ? first.second : second.second;
    i64 time = 0;
    for (int r = 0; r < ranks_; ++r) time = std::max(time, ways_of(first.second)[r].down + work_[r] + ways_of(last)[r].up);
    return time + kLargest * largest / ranks_;
  }

  const int ranks_;
  std::vector<Way> ways_;   // [shape][rank]
  std::vector<i64> total_;  // [shape]: the work of all ranks
  std::vector<i64> work_;   // [rank], of one replica
};

}  // namespace dynapipe

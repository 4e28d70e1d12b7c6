// The mean makespan of one order of actions over perturbed times.
#pragma once

#include <array>

#include "state.hpp"

namespace dynapipe {

// Disturbed times come in pairs: what makes an action longer in the one makes it as much shorter in the other. So their
// mean is never below the time of the order as predicted: a makespan is a largest sum of times, which is convex.
class Disturbances {
 public:
  static constexpr int kPairs = 8, kCount = 2 * kPairs, kScale = 1024;

  // Every action takes up to `spread` / kScale of its time more or less.
  Disturbances(const Machine& machine, i64 spread)
      : stage_rank_(machine.stage_rank), stages_(machine.stages), spread_(spread), clock_(machine.ranks) {}

  bool any() const { return spread_ > 0; }

  // Of a finished pass that has kept its sequence.
  i64 mean(const Track& track) {
    const int count = static_cast<int>(track.records.size());
    draw(count);
    forward_at_.resize(static_cast<std::size_t>(count) * stages_);
    gradient_at_.resize(static_cast<std::size_t>(count) * stages_);
    for (Times& clock : clock_) clock.fill(0);
    for (int m = 0; m < count; ++m) forward_at_[static_cast<std::size_t>(m) * stages_].fill(0);
    for (const Chosen& c : track.sequence) run(track, c);
    Times last{};
    for (const Times& clock : clock_) {
      for (int k = 0; k < kCount; ++k) last[k] = std::max(last[k], clock[k]);
    }
    i64 sum = 0;
    for (i64 one : last) sum += one;
    return sum / kCount;
  }

 private:
  using Times = std::array<i64, kCount>;

  void run(const Track& track, const Chosen& c) {
    const int s = c.stage, r = stage_rank_[s];
    const std::size_t at = static_cast<std::size_t>(c.position) * stages_ + s;
    const i64* const costs = track.records[c.position];
    const i64 time = costs[s * kFields + c.kind];
    const int* const shares = &shares_[(at * 3 + c.kind) * kPairs];
    Times& clock = clock_[r];
    if (c.kind != kWeight) {
      const Times& ready = (c.kind == kForward ? forward_at_ : gradient_at_)[at];
      for (int k = 0; k < kCount; ++k) clock[k] = std::max(clock[k], ready[k]);
    }
    for (int pair = 0; pair < kPairs; ++pair) {
      const i64 more = time * shares[pair] >> 10;
      clock[2 * pair] += time + more;
      clock[2 * pair + 1] += time - more;
    }
    if (c.kind == kForward && s + 1 == stages_) {
      gradient_at_[at] = clock;
    } else if (c.kind == kForward) {
      arrive(forward_at_[at + 1], clock, hop(costs, s));
    } else if (c.kind == kGradient && s > 0) {
      arrive(gradient_at_[at - 1], clock, hop(costs, s - 1));
    }
  }

  i64 hop(const i64* costs, int low) const {
    return stage_rank_[low] == stage_rank_[low + 1] ? 0 : costs[low * kFields + kTransfer];
  }

  static void arrive(Times& at, const Times& clock, i64 hop) {
    for (int k = 0; k < kCount; ++k) at[k] = clock[k] + hop;
  }

  // Each action's share of its time, by its place in the injection order, stage and kind: whatever runs there has it.
  void draw(int count) {
    std::size_t drawn = shares_.size();
    shares_.resize(std::max(drawn, static_cast<std::size_t>(count) * stages_ * 3 * kPairs));
    for (; drawn < shares_.size(); ++drawn) {
      shares_[drawn] = static_cast<int>(Random{drawn}.next() % static_cast<std::uint64_t>(2 * spread_ + 1)) - static_cast<int>(spread_);
    }
  }

  std::vector<int> stage_rank_;
  int stages_;
  i64 spread_;
  std::vector<int> shares_;  // [position][stage][kind][pair], of kScale
  std::vector<Times> clock_;  // [rank]
  std::vector<Times> forward_at_, gradient_at_;  // [position][stage]: when its input is there
};

}  // namespace dynapipe

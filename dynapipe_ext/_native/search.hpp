// Joint search: where the ordered items are cut into micro-batches, which replica runs each, in what order, recomputing
// what, dispatched by which policy.
#pragma once

#include <memory>

#include "disturbed.hpp"
#include "moves.hpp"
#include "pipeline.hpp"

namespace dynapipe {

constexpr i64 kInfeasible = i64{1} << 50;
constexpr int kMoveShares[] = {3, 3, 2, 6, 1, 1, 4, 2};  // how often each is tried, of the sum of what there is to move

class Search : private Moves {
 public:
  // With a `spread`, orders that take no more than `most` are judged by their mean over times that are disturbed by up to
  // `spread` / Disturbances::kScale.
  Search(Costs costs, Machine machine, std::vector<DispatchPolicy> policies, bool equal_counts, SharedCores cores, i64 spread, i64 most)
      : Moves(std::move(costs), policies.size(), equal_counts, true), cores_(cores),
        stride_(static_cast<std::size_t>(kFields) * machine.stages), policies_(std::move(policies)), dispatcher_(std::move(machine)), disturbances_(dispatcher_.machine(), spread), most_(most) {
    ways_.resize(static_cast<std::size_t>(costs_.kinds) * costs_.shapes);
  }

  // Returns the makespan of one replica of a state, see Dispatcher::run; under disturbed times their mean, unless it gives up.
  i64 run(const State& state, int d, i64 give_up, Track& track, const Track* like) {
    if (!prepare(state, d, track)) return kNever;
    if (!disturbances_.any()) return dispatcher_.run(track, like, give_up);
    track.keeps_sequence = true;
    const i64 found = dispatcher_.run(track, like, std::min(give_up, most_ + 1));
    return found < kNever && !track.records.empty() ? disturbances_.mean(track) : found;
  }

  // Best of all policies over some orders of one replica; the first order stays if nothing runs.
  void settle(State& state, int d, const std::vector<std::vector<int>>& starts) {
    Track track;
    std::vector<int> best = starts.front();
    int best_policy = 0;
    i64 least = kNever;
    for (const auto& order : starts) {
      state.groups[d] = order;
      for (state.policy[d] = 0; state.policy[d] < static_cast<int>(policies_.size()); ++state.policy[d]) {
        const i64 found = run(state, d, least, track, nullptr);
        if (found < least) {
          least = found;
          best = order;
          best_policy = state.policy[d];
        }
      }
    }
    state.groups[d] = std::move(best);
    state.policy[d] = best_policy;
    state.makespan[d] = least;
  }

  // Record-to-record travel (Dueck 1993): a move may cost up to an allowance, which shrinks with the moves made so far;
  // one that changes a single replica costs that one no more than its own allowance.
  State improve(State start, const AnnealingSchedule& walk) {
    start.floor = floor_of(start);
    const int replicas = static_cast<int>(start.groups.size());
    std::vector<int> types;
    for (int type = kSwap; type <= kDivide; ++type) {
      if (type == kRecompute && costs_.kinds == 1) continue;
      if ((type == kGive || type == kExchange) && replicas == 1) continue;
      if ((type == kShift || type == kDivide) && costs_.width == 1) continue;
      types.insert(types.end(), kMoveShares[type], type);
    }
    begin(std::move(start), walk.seed + static_cast<std::uint64_t>(walk.begun), std::move(types));
    tracks_.resize(replicas);
    trials_.resize(replicas);
    for (int d = 0; d < replicas; ++d) run(state_, d, kNever, tracks_[d], nullptr);
    for (i64 step = walk.begun; step < walk.begun + walk.moves; ++step) {
      if (!try_move()) continue;
      const i64 allowed = record_ + walk.allowance(record_, step);
      state_.floor = floor_of(state_);
      for (const auto& saved : groups_before_) makespans_.set(saved.replica, 0);
      auto [most, sum] = value();  // of what has run
      bool taken = groups_before_.size() == 1 || may_end_within(most, sum, allowed);
      for (const auto& saved : groups_before_) {
        if (!taken) break;
        const int d = saved.replica;
        i64 room = room_beside(most, sum, allowed);
        if (groups_before_.size() == 1) room = std::min(room, saved.makespan + walk.allowance(saved.makespan, step));
        const i64 found = run(state_, d, room + 1, trials_[d], &tracks_[d]);
        taken = found <= room;
        makespans_.set(d, found);
        most = std::max(most, found);
        sum += found;
      }
      if (!taken) {
        undo();
        continue;
      }
      for (const auto& saved : groups_before_) std::swap(tracks_[saved.replica], trials_[saved.replica]);
      accept({most, sum});
    }
    return best_;
  }

 private:
  // The largest makespan that one more replica may have under an energy, with the other replicas' largest and sum.
  i64 room_beside(i64 most, i64 sum, i64 allowed) const {
    const i64 weight = kMostWeight * static_cast<i64>(state_.groups.size()), left = allowed - sum;
    const i64 below = left - weight * most;
    return below <= most ? below : left / (weight + 1);
  }

  // Whether the energy may stay within a bound: no replica that the move changes ends before its busiest rank can.
  // Replicas that need the most come first: if they take too long, the rest is not run. `most`, `sum`: of the unchanged.
  bool may_end_within(i64 most, i64 sum, i64 allowed) {
    for (auto& saved : groups_before_) {
      if (!prepare(state_, saved.replica, trials_[saved.replica])) return false;
      saved.least = dispatcher_.least(trials_[saved.replica]);
      most = std::max(most, saved.least);
      sum += saved.least;
    }
    std::stable_sort(groups_before_.begin(), groups_before_.end(), [](const Saved& a, const Saved& b) { return a.least > b.least; });
    return energy({most, sum}) <= allowed;
  }

  // Prepares a pass over one replica of a state; false if one of its cuts may not be a micro-batch.
  bool prepare(const State& state, int d, Track& track) {
    track.records.clear();
    track.ways.clear();
    track.sample_of.clear();
    track.policy = &policies_[state.policy[d]];
    for (int m : state.groups[d]) {
      const i64* record = record_of(state.cuts[m]);
      if (!record) return false;
      track.records.push_back(record);
      track.ways.push_back(ways_of(record));
      track.sample_of.push_back(sample_of(m));
    }
    return true;
  }

  // Returns the least time of a state's step if ranks share cores.
  i64 floor_of(const State& state) {
    if (!cores_.tp) return 0;
    const std::size_t ranks = dispatcher_.machine().ranks;
    i64 work = 0;
    for (const Cut& cut : state.cuts) {
      if (cut.first < 0) continue;
      const Way* ways = ways_of(record_of(cut));
      for (std::size_t r = 0; r < ranks; ++r) work += ways[r].work;
    }
    return work * cores_.tp / cores_.cores;
  }

  // [rank] of a record. They are measured when they are first asked for: most records never are.
  const Way* ways_of(const i64* record) {
    auto& ways = ways_[(record - costs_.records) / stride_];
    if (!ways) {
      ways = std::make_unique<Way[]>(dispatcher_.machine().ranks);
      dispatcher_.machine().measure(record, ways.get());
    }
    return ways.get();
  }

  // The costs of a cut, or none if it may not be a micro-batch.
  const i64* record_of(const Cut& cut) const {
    const int shape = shape_of(cut);
    if (shape < 0) return nullptr;
    const i64* record = costs_.records + (static_cast<std::size_t>(cut.kind) * costs_.shapes + shape) * stride_;
    return record[kForward] >= kInfeasible ? nullptr : record;
  }

  bool may_run(const Cut& cut) const override { return record_of(cut) != nullptr; }

  SharedCores cores_;
  std::size_t stride_;
  std::vector<DispatchPolicy> policies_;
  std::vector<std::unique_ptr<Way[]>> ways_;  // [kind][shape]: [rank], see ways_of
  Dispatcher dispatcher_;
  Disturbances disturbances_;
  i64 most_;  // ns that an order may take undisturbed, if it is judged by disturbed times
  std::vector<Track> tracks_, trials_;  // [replica]: the last pass over its state, and over a moved one
};

}  // namespace dynapipe

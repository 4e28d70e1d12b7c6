// Joint search: where the ordered items are cut into micro-batches, which replica runs each, in what order, recomputing
// what, dispatched by which rule.
#pragma once

#include <memory>
#include <utility>

#include "disturbed.hpp"
#include "pipeline.hpp"
#include "state.hpp"

namespace dynapipe {

constexpr i64 kInfeasible = i64{1} << 50;

// Costs of every shape under every kind of recomputation, and the shape of every cut of items that may be a micro-batch.
struct Costs {
  int kinds = 0, shapes = 0, items = 0, width = 0;
  const i64* records = nullptr;  // [kind][shape][stage][field]
  const int* shape = nullptr;    // [last item][items of the cut - 1]: its shape, or -1
  std::vector<std::vector<int>> sample_pieces;  // items that are pieces of one sample; then cut i is item i
  std::vector<int> sample_of;                   // [item]: the sample that it is a piece of, or -1
};

constexpr i64 kMostWeight = 4;

enum Move { kSwap, kInsert, kRule, kRecompute, kGive, kExchange, kShift, kDivide, kApart };
constexpr int kMostApart = 3;  // micro-batches between two pieces of a sample that is put elsewhere
constexpr int kMoveShares[] = {3, 3, 2, 6, 1, 1, 4, 2, 4};  // how often each is tried, of the sum of what there is to move

class Search {
 public:
  // With a `spread`, orders that take no more than `most` are judged by their mean over times that are disturbed by up to
  // `spread` / Disturbances::kScale.
  Search(Costs costs, Machine machine, std::vector<Rule> rules, bool equal_counts, SharedCores cores, i64 spread, i64 most)
      : costs_(costs), cores_(cores), stride_(static_cast<std::size_t>(kFields) * machine.stages), rules_(std::move(rules)),
        equal_counts_(equal_counts), dispatcher_(std::move(machine)), disturbances_(dispatcher_.machine(), spread), most_(most) {
    ways_.resize(static_cast<std::size_t>(costs_.kinds) * costs_.shapes);
  }

  // Makespan of one replica of a state, see Dispatcher::run; where times are disturbed, their mean unless it gives up.
  i64 run(const State& state, int d, i64 give_up, Track& track, const Track* like) {
    if (!prepare(state, d, track)) return kNever;
    if (!disturbances_.any()) return dispatcher_.run(track, like, give_up);
    track.keeps_sequence = true;
    const i64 found = dispatcher_.run(track, like, std::min(give_up, most_ + 1));
    return found < kNever && !track.records.empty() ? disturbances_.mean(track) : found;
  }

  // Best of all rules over some orders of one replica; the first order stays where nothing runs.
  void settle(State& state, int d, const std::vector<std::vector<int>>& starts) {
    Track track;
    std::vector<int> best = starts.front();
    int best_rule = 0;
    i64 least = kNever;
    for (const auto& order : starts) {
      state.groups[d] = order;
      for (state.rule[d] = 0; state.rule[d] < static_cast<int>(rules_.size()); ++state.rule[d]) {
        const i64 found = run(state, d, least, track, nullptr);
        if (found < least) {
          least = found;
          best = order;
          best_rule = state.rule[d];
        }
      }
    }
    state.groups[d] = std::move(best);
    state.rule[d] = best_rule;
    state.makespan[d] = least;
  }

  // Record-to-record travel (Dueck 1993): a move may cost up to an allowance, which shrinks with the moves made so far;
  // one that changes a single replica costs that one no more than its own allowance.
  State improve(State start, const Walk& walk) {
    start.floor = floor_of(start);
    State best = start;
    auto best_value = value(start);
    i64 record = energy(best_value, start.makespan.size());
    state_ = std::move(start);
    makespans_ = Makespans(state_.makespan);
    random_ = Random{walk.seed + static_cast<std::uint64_t>(walk.begun)};
    const int replicas = static_cast<int>(state_.groups.size());
    moves_.clear();
    for (int move = kSwap; move <= kApart; ++move) {
      if (move == kRecompute && costs_.kinds == 1) continue;
      if ((move == kGive || move == kExchange) && replicas == 1) continue;
      if ((move == kShift || move == kDivide) && costs_.width == 1) continue;
      if (move == kApart && costs_.sample_pieces.empty()) continue;
      moves_.insert(moves_.end(), kMoveShares[move], move);
    }
    tracks_.resize(replicas);
    trials_.resize(replicas);
    for (int d = 0; d < replicas; ++d) run(state_, d, kNever, tracks_[d], nullptr);
    begins_at_.assign(costs_.items + 1, -1);
    ends_at_.assign(costs_.items + 1, -1);
    owner_.assign(state_.cuts.size(), -1);
    for (int m = 0; m < static_cast<int>(state_.cuts.size()); ++m) place(m);
    for (int d = 0; d < replicas; ++d) own(d);
    std::vector<int> replicas_since, cuts_since;  // what has changed since the best
    for (i64 step = walk.begun; step < walk.begun + walk.moves; ++step) {
      forget();
      if (!move()) {
        undo();
        continue;
      }
      for (const auto& saved : groups_before_) in_piece_order(state_.groups[saved.replica]);
      const i64 allowed = record + walk.allowance(record, step);
      bool taken = true;
      state_.floor = floor_of(state_);
      for (const auto& saved : groups_before_) makespans_.set(saved.replica, 0);
      i64 most = std::max(state_.floor, makespans_.of(makespans_.largest())), sum = makespans_.sum();  // of what has run
      taken = groups_before_.size() == 1 || may_end_within(most, sum, allowed);
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
      for (const auto& saved : groups_before_) {
        std::swap(tracks_[saved.replica], trials_[saved.replica]);
        own(saved.replica);
        replicas_since.push_back(saved.replica);
      }
      for (const auto& saved : cuts_before_) {
        place(saved.first);
        cuts_since.push_back(saved.first);
      }
      const Value found{most, sum};
      record = std::min(record, energy(found, replicas));
      if (found < best_value) {
        best_value = found;
        copy_to(best, replicas_since, cuts_since);
        replicas_since.clear();
        cuts_since.clear();
      }
    }
    return best;
  }

 private:
  using Value = std::pair<i64, i64>;

  // What is best: the smallest largest makespan, if not under the floor, then the smallest sum.
  static Value value(const State& state) {
    i64 most = state.floor, sum = 0;
    for (i64 one : state.makespan) {
      most = std::max(most, one);
      sum += one;
    }
    return {most, sum};
  }

  // What moves may raise a little: mostly the largest makespan, and a little the mean, so that other replicas make room.
  static i64 energy(const Value& value, std::size_t replicas) {
    return kMostWeight * value.first * static_cast<i64>(replicas) + value.second;
  }

  // The makespan that one replica more may have under an energy, beside the others' largest and sum.
  i64 room_beside(i64 most, i64 sum, i64 allowed) const {
    const i64 weight = kMostWeight * static_cast<i64>(state_.makespan.size()), left = allowed - sum;
    const i64 below = left - weight * most;
    return below <= most ? below : left / (weight + 1);
  }

  // Whether the energy may stay within a bound: no replica that the move changes ends before its busiest rank can.
  // Those that need the most come first: if they take too long, the others are not run. `most`, `sum`: of the others.
  bool may_end_within(i64 most, i64 sum, i64 allowed) {
    for (auto& saved : groups_before_) {
      if (!prepare(state_, saved.replica, trials_[saved.replica])) return false;
      saved.least = dispatcher_.least(trials_[saved.replica]);
      most = std::max(most, saved.least);
      sum += saved.least;
    }
    std::stable_sort(groups_before_.begin(), groups_before_.end(), [](const Saved& a, const Saved& b) { return a.least > b.least; });
    return energy({most, sum}, state_.makespan.size()) <= allowed;
  }

  // What a pass over one replica of a state is given; false where one of its cuts may not be a micro-batch.
  bool prepare(const State& state, int d, Track& track) {
    track.records.clear();
    track.ways.clear();
    track.sample_of.clear();
    track.rule = &rules_[state.rule[d]];
    for (int m : state.groups[d]) {
      const i64* record = record_of(state.cuts[m]);
      if (!record) return false;
      track.records.push_back(record);
      track.ways.push_back(ways_of(record));
      track.sample_of.push_back(sample_of(m));
    }
    return true;
  }

  // What has changed, in the best state as well.
  void copy_to(State& best, const std::vector<int>& replicas, const std::vector<int>& cuts) const {
    for (int d : replicas) {
      best.groups[d] = state_.groups[d];
      best.rule[d] = state_.rule[d];
      best.makespan[d] = makespans_.of(d);
    }
    best.cuts.resize(state_.cuts.size(), {-1, -1, 0});
    for (int m : cuts) best.cuts[m] = state_.cuts[m];
    best.floor = state_.floor;
  }

  // Where a cut lies among the items, and the replica of each cut: an index, for both are looked up at every move.
  void place(int m) {
    if (state_.cuts[m].first < 0) return;
    begins_at_[state_.cuts[m].first] = ends_at_[state_.cuts[m].end] = m;
  }
  void own(int d) {
    owner_.resize(state_.cuts.size(), -1);
    for (int m : state_.groups[d]) owner_[m] = d;
  }

  // What a state's step takes at least where ranks share cores.
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
      dispatcher_.measure(record, ways.get());
    }
    return ways.get();
  }

  // The costs of a cut, or none where it may not be a micro-batch.
  const i64* record_of(const Cut& cut) const {
    const int items = cut.end - cut.first;
    if (items > costs_.width) return nullptr;
    const int shape = costs_.shape[static_cast<std::size_t>(cut.end - 1) * costs_.width + items - 1];
    if (shape < 0) return nullptr;
    const i64* record = costs_.records + (static_cast<std::size_t>(cut.kind) * costs_.shapes + shape) * stride_;
    return record[kForward] >= kInfeasible ? nullptr : record;
  }

  // Changes something at random, mostly of the slowest replica; false where nothing changed or nothing can run.
  bool move() {
    const int replicas = static_cast<int>(state_.groups.size());
    int d = random_.below(replicas);
    if (random_.below(2)) {
      const int slowest = makespans_.largest();
      if (makespans_.of(slowest) > makespans_.of(d)) d = slowest;
    }
    const int type = moves_[random_.below(moves_.size())];
    const std::uint64_t a = random_.next(), b = random_.next();
    auto& mine = state_.groups[d];
    const std::size_t n = mine.size();
    if (n == 0) return false;
    save_group(d);
    const std::size_t i = a % n, j = b % n;
    switch (type) {
      case kSwap:
        std::swap(mine[i], mine[j]);
        return i != j;
      case kInsert: {
        const int m = mine[i];
        mine.erase(mine.begin() + i);
        mine.insert(mine.begin() + j, m);
        return i != j;
      }
      case kRule:
        rule_before_ = {d, state_.rule[d]};
        state_.rule[d] = static_cast<int>(a % rules_.size());
        return state_.rule[d] != rule_before_.second;
      case kRecompute: {
        Cut& cut = state_.cuts[mine[i]];
        const int kind = static_cast<int>(b % costs_.kinds);
        if (cut.kind == kind) return false;
        save_cut(mine[i]);
        cut.kind = kind;
        return record_of(cut) != nullptr;
      }
      case kGive:
      case kExchange: {
        int other = random_.below(replicas - 1);
        other += other >= d;
        auto& theirs = state_.groups[other];
        save_group(other);
        const std::vector<int> given = unit(mine[i]);
        if (type == kExchange && !theirs.empty()) {
          const std::size_t at = b % theirs.size();
          const std::vector<int> taken = unit(theirs[at]);
          if (equal_counts_ && given.size() != taken.size()) return false;
          put_in_place(mine, i, given, taken);
          put_in_place(theirs, at, taken, given);
          return true;
        }
        if (type == kExchange || equal_counts_ || n == given.size()) return false;
        put_in_place(mine, i, given, {});
        theirs.insert(theirs.begin() + b % (theirs.size() + 1), given.begin(), given.end());
        return true;
      }
      case kApart:
        if (sample_of(mine[i]) < 0) return false;
        place_apart(mine, unit(mine[i]), b >> 2, b % (kMostApart + 1));
        return true;
      case kShift:
        return shift(mine[i], b);
      default:
        return divide(d, mine[i], b, random_.next());
    }
  }

  int sample_of(int m) const { return costs_.sample_pieces.empty() ? -1 : costs_.sample_of[m]; }

  // The cuts that go together with one: all pieces of its sample.
  std::vector<int> unit(int m) const { return sample_of(m) < 0 ? std::vector<int>{m} : costs_.sample_pieces[sample_of(m)]; }

  // Puts the pieces of each sample into their order, at the places where they stand.
  void in_piece_order(std::vector<int>& group) const {
    if (costs_.sample_pieces.empty()) return;
    std::vector<std::size_t> next(costs_.sample_pieces.size(), 0);
    for (int& m : group) {
      if (const int sample = sample_of(m); sample >= 0) m = costs_.sample_pieces[sample][next[sample]++];
    }
  }

  // The boundary between a cut and a neighbour moves by some items; a cut that loses all of them is gone.
  bool shift(int m, std::uint64_t b) {
    const bool at_end = b & 1, grows = b & 2;
    b >>= 2;
    const int boundary = at_end ? state_.cuts[m].end : state_.cuts[m].first;
    if (boundary == 0 || boundary == costs_.items) return false;
    const int low = ends_at_[boundary], high = begins_at_[boundary];
    const int giver = grows == at_end ? high : low;
    const int all = state_.cuts[giver].end - state_.cuts[giver].first;
    const int by = std::min(all, static_cast<int>(1 + (b >> 3) % (std::uint64_t{1} << b % 6)));
    const int of_low = owner_[low], of_high = owner_[high];
    save_cut(low);
    save_cut(high);
    save_group(of_low);
    save_group(of_high);
    const int moved = giver == high ? boundary + by : boundary - by;
    state_.cuts[low].end = state_.cuts[high].first = moved;
    if (by < all) return record_of(state_.cuts[low]) && record_of(state_.cuts[high]);
    auto& group = state_.groups[giver == low ? of_low : of_high];
    if (equal_counts_ || group.size() == 1) return false;
    group.erase(std::find(group.begin(), group.end(), giver));
    state_.cuts[giver].first = state_.cuts[giver].end = -1;
    return record_of(state_.cuts[giver == low ? high : low]) != nullptr;
  }

  // A cut becomes two.
  bool divide(int d, int m, std::uint64_t b, std::uint64_t c) {
    const Cut whole = state_.cuts[m];
    const int items = whole.end - whole.first;
    if (items < 2 || equal_counts_) return false;
    int fresh = 0;
    while (fresh < static_cast<int>(state_.cuts.size()) && state_.cuts[fresh].first >= 0) ++fresh;
    if (fresh == static_cast<int>(state_.cuts.size())) state_.cuts.push_back({-1, -1, 0});
    save_cut(m);
    save_cut(fresh);
    const int at = whole.first + 1 + static_cast<int>(b % (items - 1));
    state_.cuts[m].end = at;
    state_.cuts[fresh] = {at, whole.end, whole.kind};
    auto& mine = state_.groups[d];
    mine.insert(mine.begin() + c % (mine.size() + 1), fresh);
    return record_of(state_.cuts[m]) && record_of(state_.cuts[fresh]);
  }

  void save_group(int d) {
    for (const auto& saved : groups_before_) {
      if (saved.replica == d) return;
    }
    groups_before_.push_back({d, makespans_.of(d), state_.groups[d], 0});
  }

  void save_cut(int m) { cuts_before_.push_back({m, state_.cuts[m]}); }

  void forget() {
    groups_before_.clear();
    cuts_before_.clear();
    rule_before_.first = -1;
    floor_before_ = state_.floor;
  }

  void undo() {
    for (auto& saved : groups_before_) {
      state_.groups[saved.replica] = std::move(saved.group);
      makespans_.set(saved.replica, saved.makespan);
    }
    for (const auto& saved : cuts_before_) state_.cuts[saved.first] = saved.second;
    if (rule_before_.first >= 0) state_.rule[rule_before_.first] = rule_before_.second;
    state_.floor = floor_before_;
  }

  Costs costs_;
  SharedCores cores_;
  std::size_t stride_;
  std::vector<Rule> rules_;
  std::vector<std::unique_ptr<Way[]>> ways_;  // [kind][shape]: [rank], see ways_of
  bool equal_counts_;
  Dispatcher dispatcher_;
  Disturbances disturbances_;
  i64 most_;  // ns that an order may take undisturbed, where it is judged by disturbed times
  State state_;  // its makespans are those of the start
  Makespans makespans_{{}};
  Random random_{0};
  std::vector<int> moves_;
  std::vector<Track> tracks_, trials_;  // [replica]: the last pass over its state, and over a moved one
  struct Saved {
    int replica;
    i64 makespan;
    std::vector<int> group;
    i64 least = 0;  // of its changed group, see may_end_within
  };
  std::vector<int> begins_at_, ends_at_;  // [item]: the cut that begins there, and that ends before it
  std::vector<int> owner_;                // [cut]: its replica
  std::vector<Saved> groups_before_;
  std::vector<std::pair<int, Cut>> cuts_before_;
  std::pair<int, int> rule_before_{-1, 0};
  i64 floor_before_ = 0;
};

}  // namespace dynapipe

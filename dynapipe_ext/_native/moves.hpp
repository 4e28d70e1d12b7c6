// Random moves of a state, each of which can be undone.
#pragma once

#include "state.hpp"

namespace dynapipe {

// Costs of every shape under every kind of recomputation, and the shape of every cut of items that may be a micro-batch.
struct Costs {
  int kinds = 0, shapes = 0, items = 0, width = 0;
  const i64* records = nullptr;  // [kind][shape][stage][field]
  const int* shape = nullptr;    // [last item][items of the cut - 1]: its shape, or -1
  std::vector<std::vector<int>> sample_pieces;  // items that are pieces of one sample; then cut i is item i
  std::vector<int> sample_of;                   // [item]: the sample that it is a piece of, or -1
};

enum Move { kSwap, kInsert, kPolicy, kRecompute, kGive, kExchange, kShift, kDivide };
constexpr i64 kMostWeight = 4;

// A walk from state to state. A search prices the states, and says which cuts may be micro-batches.
class Moves {
 protected:
  using Value = std::pair<i64, i64>;  // the largest makespan, the sum of all

  // If `are_ordered`, what a replica receives takes a random place in its order; otherwise it is added at the end.
  Moves(Costs costs, std::size_t num_policies, bool equal_counts, bool are_ordered)
      : costs_(std::move(costs)), num_policies_(num_policies), equal_counts_(equal_counts), are_ordered_(are_ordered) {}
  ~Moves() = default;

  // What moves may raise a little: mostly the largest makespan, and a little the mean, so that other replicas make room.
  i64 energy(const Value& value) const { return kMostWeight * value.first * static_cast<i64>(state_.groups.size()) + value.second; }

  // What is best: the smallest largest makespan, if not under the floor, then the smallest sum.
  Value value() const { return {std::max(state_.floor, makespans_.of(makespans_.largest())), makespans_.sum()}; }

  virtual bool may_run(const Cut& cut) const { return shape_of(cut) >= 0; }

  // The shape of a cut, or -1 if it may not be a micro-batch.
  int shape_of(const Cut& cut) const {
    const int items = cut.end - cut.first;
    return items > costs_.width ? -1 : costs_.shape[static_cast<std::size_t>(cut.end - 1) * costs_.width + items - 1];
  }

  int sample_of(int m) const { return costs_.sample_pieces.empty() ? -1 : costs_.sample_of[m]; }

  // Begins at a state, with the types of move to choose from.
  void begin(State start, std::uint64_t seed, std::vector<int> types) {
    random_ = Random{seed};
    types_ = std::move(types);
    best_ = start;
    state_ = std::move(start);
    makespans_ = Makespans(state_.makespan);
    best_value_ = value();
    record_ = energy(best_value_);
    begins_at_.assign(costs_.items + 1, -1);
    ends_at_.assign(costs_.items + 1, -1);
    for (int m = 0; m < static_cast<int>(state_.cuts.size()); ++m) place(m);
    for (int d = 0; d < static_cast<int>(state_.groups.size()); ++d) own(d);
  }

  // Makes a move; false if the state is as before, for nothing changed or nothing can run.
  bool try_move() {
    groups_before_.clear();
    cuts_before_.clear();
    policy_before_.first = -1;
    floor_before_ = state_.floor;
    if (!move()) {
      undo();
      return false;
    }
    for (const auto& saved : groups_before_) in_piece_order(state_.groups[saved.replica]);
    return true;
  }

  // Keeps the move, after which the state has this value.
  void accept(const Value& now) {
    for (const auto& saved : groups_before_) {
      own(saved.replica);
      replicas_since_.push_back(saved.replica);
    }
    for (const auto& saved : cuts_before_) {
      num_gone_ += (state_.cuts[saved.first].first < 0) - (saved.second.first < 0);
      place(saved.first);
      cuts_since_.push_back(saved.first);
    }
    record_ = std::min(record_, energy(now));
    if (now < best_value_) {
      best_value_ = now;
      keep_as_best();
    }
  }

  void undo() {
    for (auto& saved : groups_before_) {
      state_.groups[saved.replica] = std::move(saved.group);
      makespans_.set(saved.replica, saved.makespan);
    }
    for (const auto& saved : cuts_before_) state_.cuts[saved.first] = saved.second;
    if (policy_before_.first >= 0) state_.policy[policy_before_.first] = policy_before_.second;
    state_.floor = floor_before_;
  }

  struct Saved {
    int replica;
    i64 makespan;
    std::vector<int> group;
    i64 least;  // of its changed group, if a search asks for it
  };
  const Costs costs_;
  State state_, best_;  // makespans of `state_` are those of the start
  Makespans makespans_{{}};
  std::vector<Saved> groups_before_;  // of the replicas that the last move changed
  i64 record_ = 0;  // the least energy so far

 private:
  // Copies what has changed since to the best state.
  void keep_as_best() {
    for (int d : replicas_since_) {
      best_.groups[d] = state_.groups[d];
      best_.policy[d] = state_.policy[d];
      best_.makespan[d] = makespans_.of(d);
    }
    best_.cuts.resize(state_.cuts.size(), {-1, -1, 0});
    for (int m : cuts_since_) best_.cuts[m] = state_.cuts[m];
    best_.floor = state_.floor;
    replicas_since_.clear();
    cuts_since_.clear();
  }

  // Changes something at random, mostly of the slowest replica; false if nothing changed or nothing can run.
  bool move() {
    const int replicas = static_cast<int>(state_.groups.size());
    int d = random_.below(replicas);
    if (random_.below(2)) {
      const int slowest = makespans_.largest();
      if (makespans_.of(slowest) > makespans_.of(d)) d = slowest;
    }
    const int type = types_[random_.below(types_.size())];
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
      case kPolicy:
        policy_before_ = {d, state_.policy[d]};
        state_.policy[d] = static_cast<int>(a % num_policies_);
        return state_.policy[d] != policy_before_.second;
      case kRecompute: {
        Cut& cut = state_.cuts[mine[i]];
        const int kind = static_cast<int>(b % costs_.kinds);
        if (cut.kind == kind) return false;
        save_cut(mine[i]);
        cut.kind = kind;
        return may_run(cut);
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
        theirs.insert(theirs.begin() + (are_ordered_ ? b % (theirs.size() + 1) : theirs.size()), given.begin(), given.end());
        return true;
      }
      case kShift:
        return shift(mine[i], b);
      default:
        return divide(mine, mine[i], b, are_ordered_ ? random_.next() % (n + 1) : n);
    }
  }

  // The cuts that go together with one: all pieces of its sample.
  std::vector<int> unit(int m) const { return sample_of(m) < 0 ? std::vector<int>{m} : costs_.sample_pieces[sample_of(m)]; }

  // Puts the pieces of each sample into their order, at the places that they have.
  void in_piece_order(std::vector<int>& group) const {
    if (costs_.sample_pieces.empty()) return;
    std::vector<std::size_t> next(costs_.sample_pieces.size(), 0);
    for (int& m : group) {
      if (const int sample = sample_of(m); sample >= 0) m = costs_.sample_pieces[sample][next[sample]++];
    }
  }

  // Moves the boundary between a cut and a neighbour by some items; a cut that loses all of them is gone.
  bool shift(int m, std::uint64_t b) {
    const bool at_end = b & 1, grows = b & 2;
    b >>= 2;
    const int boundary = at_end ? state_.cuts[m].end : state_.cuts[m].first;
    if (boundary == 0 || boundary == costs_.items) return false;
    const int low = ends_at_[boundary], high = begins_at_[boundary];
    const int giver = grows == at_end ? high : low;
    const int all = state_.cuts[giver].end - state_.cuts[giver].first;
    const int by = std::min(all, static_cast<int>(1 + (b >> 3) % (std::uint64_t{1} << b % 6)));
    auto& group = state_.groups[owner_[giver]];
    if (by == all && (equal_counts_ || group.size() == 1)) return false;
    save_cut(low);
    save_cut(high);
    save_group(owner_[low]);
    save_group(owner_[high]);
    state_.cuts[low].end = state_.cuts[high].first = giver == high ? boundary + by : boundary - by;
    if (by < all) return may_run(state_.cuts[low]) && may_run(state_.cuts[high]);
    group.erase(std::find(group.begin(), group.end(), giver));
    state_.cuts[giver].first = state_.cuts[giver].end = -1;
    return may_run(state_.cuts[giver == low ? high : low]);
  }

  // Makes two of a cut; the second one takes a place of the group.
  bool divide(std::vector<int>& group, int m, std::uint64_t b, std::size_t place) {
    const Cut whole = state_.cuts[m];
    const int items = whole.end - whole.first;
    if (items < 2 || equal_counts_) return false;
    int fresh = static_cast<int>(num_gone_ ? 0 : state_.cuts.size());
    while (fresh < static_cast<int>(state_.cuts.size()) && state_.cuts[fresh].first >= 0) ++fresh;
    if (fresh == static_cast<int>(state_.cuts.size())) {
      state_.cuts.push_back({-1, -1, 0});
      ++num_gone_;
    }
    save_cut(m);
    save_cut(fresh);
    const int at = whole.first + 1 + static_cast<int>(b % (items - 1));
    state_.cuts[m].end = at;
    state_.cuts[fresh] = {at, whole.end, whole.kind};
    group.insert(group.begin() + place, fresh);
    return may_run(state_.cuts[m]) && may_run(state_.cuts[fresh]);
  }

  // Notes where a cut is among the items, and the replica of each cut: both are looked up at every move.
  void place(int m) {
    if (state_.cuts[m].first < 0) return;
    begins_at_[state_.cuts[m].first] = ends_at_[state_.cuts[m].end] = m;
  }
  void own(int d) {
    owner_.resize(state_.cuts.size(), -1);
    for (int m : state_.groups[d]) owner_[m] = d;
  }

  void save_group(int d) {
    for (const auto& saved : groups_before_) {
      if (saved.replica == d) return;
    }
    groups_before_.push_back({d, makespans_.of(d), state_.groups[d], 0});
  }

  void save_cut(int m) { cuts_before_.push_back({m, state_.cuts[m]}); }

  const std::size_t num_policies_;
  const bool equal_counts_, are_ordered_;
  Random random_{0};
  std::vector<int> types_;
  std::vector<int> begins_at_, ends_at_;  // [item]: the cut that begins there, and that ends before it
  std::vector<int> owner_;                // [cut]: its replica
  std::vector<std::pair<int, Cut>> cuts_before_;
  std::pair<int, int> policy_before_{-1, 0};
  i64 floor_before_ = 0;
  std::vector<int> replicas_since_, cuts_since_;  // what has changed since the best
  Value best_value_;
  int num_gone_ = 0;                              // of the cuts
};

}  // namespace dynapipe

// Cuts and replicas made even by what every rank has to do, before an order is simulated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "state.hpp"

namespace dynapipe {

// Of every shape that may be a micro-batch, by rank: [shape][rank], ns.
struct RankTimes {
  int ranks = 0;
  const i64 *work = nullptr, *head = nullptr, *tail = nullptr;
  const i64* total = nullptr;  // [shape]: all work
};

class Levelling {
 public:
  using Range = std::pair<int, int>;  // items first .. end - 1; first < 0: merged away

  // `shape` [last item][items - 1]: the shape of a cut, or -1 where it may not be a micro-batch.
  Levelling(RankTimes times, const int* shape, int items, int width, std::vector<Range> cuts, Groups groups, bool equal_counts)
      : times_(times), shape_(shape), items_(items), width_(width), equal_counts_(equal_counts), cuts_(std::move(cuts)),
        groups_(std::move(groups)), begins_at_(items + 1, -1), ends_at_(items + 1, -1), owner_(cuts_.size(), -1) {
    std::vector<i64> all;
    for (int m = 0; m < static_cast<int>(cuts_.size()); ++m) place(m);
    for (int d = 0; d < static_cast<int>(groups_.size()); ++d) {
      own(d);
      all.push_back(time_of(groups_[d]));
    }
    replica_ns_ = Makespans(all);
  }

  // Record-to-record travel (Dueck 1993), as in the search; the best state stays.
  void improve(i64 moves, std::uint64_t seed) {
    random_ = Random{seed};
    const auto replicas = static_cast<i64>(groups_.size());
    Value best{most(), replica_ns_.sum()};
    auto best_cuts = cuts_;
    auto best_groups = groups_;
    std::vector<int> replicas_since, cuts_since;  // what has changed since the best
    i64 record = energy(best, replicas);
    for (i64 step = 0; step < moves; ++step) {
      groups_before_.clear();
      cuts_before_.clear();
      bool taken = move();
      if (taken) {
        for (const auto& saved : groups_before_) replica_ns_.set(saved.replica, time_of(groups_[saved.replica]));
        const Value value{most(), replica_ns_.sum()};
        taken = energy(value, replicas) <= record + record / 4096 * (moves - step) / moves;
        if (taken) {
          record = std::min(record, energy(value, replicas));
          for (const auto& saved : groups_before_) {
            own(saved.replica);
            replicas_since.push_back(saved.replica);
          }
          for (const auto& saved : cuts_before_) {
            num_gone_ += (cuts_[saved.first].first < 0) - (saved.second.first < 0);
            place(saved.first);
            cuts_since.push_back(saved.first);
          }
          if (value < best) {
            best = value;
            best_cuts.resize(cuts_.size(), {-1, -1});
            for (int d : replicas_since) best_groups[d] = groups_[d];
            for (int m : cuts_since) best_cuts[m] = cuts_[m];
            replicas_since.clear();
            cuts_since.clear();
          }
        }
      }
      if (!taken) undo();
    }
    cuts_ = std::move(best_cuts);
    groups_ = std::move(best_groups);
  }

  const std::vector<Range>& cuts() const { return cuts_; }
  const Groups& groups() const { return groups_; }

 private:
  using Value = std::pair<i64, i64>;
  enum Move { kShift, kDivide, kGive, kExchange };
  static constexpr int kShares[] = {4, 2, 1, 1};
  static constexpr i64 kMostWeight = 4, kLargest = 3;

  i64 most() const { return replica_ns_.of(replica_ns_.largest()); }

  static i64 energy(const Value& value, i64 replicas) { return kMostWeight * replicas * value.first + value.second; }

  int shape_of(const Range& cut) const {
    const int rows = cut.second - cut.first;
    return rows > width_ ? -1 : shape_[static_cast<std::size_t>(cut.second - 1) * width_ + rows - 1];
  }

  // About how long a good order of these cuts takes that has the cheapest first and the next one last.
  i64 time_of(const std::vector<int>& group) {
    if (group.empty()) return 0;
    const int ranks = times_.ranks;
    work_.assign(ranks, 0);
    std::pair<i64, int> first{kNever, 0}, second{kNever, 0};
    i64 largest = 0;
    for (int m : group) {
      const int shape = shape_of(cuts_[m]);
      const i64* const work = times_.work + static_cast<std::size_t>(shape) * ranks;
      for (int r = 0; r < ranks; ++r) work_[r] += work[r];
      const std::pair<i64, int> mine{times_.total[shape], shape};
      largest = std::max(largest, mine.first);
      if (mine < first) {
        second = first;
        first = mine;
      } else if (mine < second) {
        second = mine;
      }
    }
    const int last = group.size() == 1 ? first.second : second.second;
    const i64* const head = times_.head + static_cast<std::size_t>(first.second) * ranks;
    const i64* const tail = times_.tail + static_cast<std::size_t>(last) * ranks;
    i64 time = 0;
    for (int r = 0; r < ranks; ++r) time = std::max(time, head[r] + work_[r] + tail[r]);
    return time + kLargest * largest / ranks;
  }

  void place(int m) {
    if (cuts_[m].first < 0) return;
    begins_at_[cuts_[m].first] = m;
    ends_at_[cuts_[m].second] = m;
  }

  void own(int d) {
    for (int m : groups_[d]) {
      if (m >= static_cast<int>(owner_.size())) owner_.resize(m + 1, -1);
      owner_[m] = d;
    }
  }

  bool move() {
    const auto replicas = groups_.size();
    int d = random_.below(replicas);
    if (random_.below(2) && most() > replica_ns_.of(d)) d = replica_ns_.largest();
    const int total = replicas > 1 ? 8 : 6;
    int pick = random_.below(total), kind = 0;
    while (pick >= kShares[kind]) pick -= kShares[kind++];
    const std::uint64_t a = random_.next(), b = random_.next();
    auto& mine = groups_[d];
    if (mine.empty()) return false;
    const std::size_t i = a % mine.size();
    switch (kind) {
      case kShift:
        return shift(mine[i], b);
      case kDivide:
        return divide(d, mine[i], b);
      default:
        return hand_over(d, i, b, kind == kExchange);
    }
  }

  // Replica d gives a cut to another one, or exchanges it for one of the other's.
  bool hand_over(int d, std::size_t i, std::uint64_t b, bool exchange) {
    int other = random_.below(groups_.size() - 1);
    other += other >= d;
    auto &mine = groups_[d], &theirs = groups_[other];
    if (exchange ? theirs.empty() : equal_counts_ || mine.size() == 1) return false;
    save_group(d);
    save_group(other);
    if (exchange) {
      std::swap(mine[i], theirs[b % theirs.size()]);
    } else {
      theirs.push_back(mine[i]);
      mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return true;
  }

  // The boundary between a cut and a neighbour moves by some items; a cut that loses all of them is gone.
  bool shift(int m, std::uint64_t b) {
    const bool at_end = b & 1, grows = b & 2;
    b >>= 2;
    const int boundary = at_end ? cuts_[m].second : cuts_[m].first;
    if (boundary == 0 || boundary == items_) return false;
    const int low = ends_at_[boundary], high = begins_at_[boundary];
    const int giver = grows == at_end ? high : low, taker = giver == high ? low : high;
    const int all = cuts_[giver].second - cuts_[giver].first;
    const int by = std::min(all, static_cast<int>(1 + (b >> 3) % (std::uint64_t{1} << b % 6)));
    auto& group = groups_[owner_[giver]];
    if (by == all && (equal_counts_ || group.size() == 1)) return false;
    save_cut(low);
    save_cut(high);
    save_group(owner_[low]);
    save_group(owner_[high]);
    cuts_[low].second = cuts_[high].first = giver == high ? boundary + by : boundary - by;
    if (by == all) {
      group.erase(std::find(group.begin(), group.end(), giver));
      cuts_[giver] = {-1, -1};
      return shape_of(cuts_[taker]) >= 0;
    }
    return shape_of(cuts_[low]) >= 0 && shape_of(cuts_[high]) >= 0;
  }

  // A cut becomes two.
  bool divide(int d, int m, std::uint64_t b) {
    const Range whole = cuts_[m];
    const int rows = whole.second - whole.first;
    if (rows < 2 || equal_counts_) return false;
    int fresh = static_cast<int>(cuts_.size());
    for (int k = 0; num_gone_ > 0 && k < static_cast<int>(cuts_.size()); ++k) {
      if (cuts_[k].first < 0) {
        fresh = k;
        break;
      }
    }
    if (fresh == static_cast<int>(cuts_.size())) {
      cuts_.push_back({-1, -1});
      ++num_gone_;
    }
    save_cut(m);
    save_cut(fresh);
    save_group(d);
    const int at = whole.first + 1 + static_cast<int>(b % (rows - 1));
    cuts_[m].second = at;
    cuts_[fresh] = {at, whole.second};
    groups_[d].push_back(fresh);
    return shape_of(cuts_[m]) >= 0 && shape_of(cuts_[fresh]) >= 0;
  }

  void save_group(int d) {
    for (const auto& saved : groups_before_) {
      if (saved.replica == d) return;
    }
    groups_before_.push_back({d, replica_ns_.of(d), groups_[d]});
  }

  void save_cut(int m) { cuts_before_.push_back({m, cuts_[m]}); }

  void undo() {
    for (auto& saved : groups_before_) {
      groups_[saved.replica] = std::move(saved.group);
      replica_ns_.set(saved.replica, saved.time_ns);
    }
    for (const auto& saved : cuts_before_) cuts_[saved.first] = saved.second;
  }

  struct Saved {
    int replica;
    i64 time_ns;
    std::vector<int> group;
  };
  RankTimes times_;
  const int* shape_;
  int items_, width_;
  bool equal_counts_;
  std::vector<Range> cuts_;
  Groups groups_;
  std::vector<int> begins_at_, ends_at_, owner_;
  Makespans replica_ns_{{}};
  Random random_{0};
  std::vector<Saved> groups_before_;
  std::vector<std::pair<int, Range>> cuts_before_;
  std::vector<i64> work_;
  int num_gone_ = 0;  // of the cuts
};

}  // namespace dynapipe

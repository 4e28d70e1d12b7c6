// Items exchanged between groups until their loads are even.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include "numbers.hpp"

namespace dynapipe {

class Balance {
 public:
  Balance(Groups groups, const std::vector<i64>& costs, bool equal_counts)
      : groups_(std::move(groups)), costs_(costs), equal_counts_(equal_counts) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      i64 load = 0;
      for (int item : groups_[g]) load += costs_[item];
      sort(groups_[g]);
      loads_.push_back(load);
      by_load_.emplace_back(load, static_cast<int>(g));
    }
    std::sort(by_load_.begin(), by_load_.end());
  }

  // The groups once no exchange helps, the largest load is close to `floor`, or after so many rounds.
  Groups refined(i64 floor, i64 rounds) && {
    for (i64 round = 0; round < rounds; ++round) {
      const i64 most = by_load_.back().first;
      if ((most - floor) * kCloseEnough <= floor) break;
      const int top = std::lower_bound(by_load_.begin(), by_load_.end(), std::pair{most, 0})->second;  // the first of equals
      if (!lower(top)) break;
    }
    return std::move(groups_);
  }

 private:
  struct Exchange {
    i64 off;  // how far from even it leaves the two loads
    std::vector<int> to_give, to_take;
  };
  struct Unit {  // up to two items: the sum of their costs, and their places in the group, the same twice for one item
    i64 sum;
    int a, b;
  };
  static constexpr i64 kCloseEnough = 10'000;
  static constexpr std::size_t kMostInPairs = 96, kPartners = 8;

  void sort(std::vector<int>& group) const {
    std::sort(group.begin(), group.end(), [&](int a, int b) { return std::pair{costs_[a], a} < std::pair{costs_[b], b}; });
  }

  // Whether some exchange lowered the load of the group, which is the largest.
  bool lower(int top) {
    for (int size = 1; size <= 2; ++size) {
      const std::size_t most = size == 1 ? by_load_.size() : std::min(kPartners, by_load_.size());
      for (std::size_t k = 0; k < most; ++k) {
        const auto [load, other] = by_load_[k];
        const i64 gap = loads_[top] - load;
        if (other == top || gap < 2) continue;
        if (size > 1 && groups_[top].size() + groups_[other].size() > kMostInPairs) continue;
        Exchange best{gap, {}, {}};
        find(top, other, size, best);
        if (best.off >= gap) continue;
        move(top, best.to_give, best.to_take);
        move(other, best.to_take, best.to_give);
        return true;
      }
    }
    return false;
  }

  // The exchange of at most `size` items each way that brings two loads nearest to each other, if it beats `best`.
  void find(int top, int other, int size, Exchange& best) {
    for (int num_given = 1; num_given <= size; ++num_given) {
      units(groups_[top], num_given, given_);
      for (int num_taken = equal_counts_ ? num_given : 0; num_taken <= (equal_counts_ ? num_given : size); ++num_taken) {
        if (std::max(num_given, num_taken) < size) continue;
        units(groups_[other], num_taken, taken_);
        if (!given_.empty() && !taken_.empty()) find_nearest(top, other, best);
      }
    }
  }

  void find_nearest(int top, int other, Exchange& best) {
    const i64 gap = loads_[top] - loads_[other];
    const i64 last = static_cast<i64>(taken_.size()) - 1;
    for (const bool before : {true, false}) {
      i64 place = 0;
      for (const Unit& unit : given_) {  // sums ascend, and so do their places
        while (place <= last && taken_[place].sum < unit.sum - gap / 2) ++place;
        const Unit& near = taken_[before ? std::max(place - 1, i64{0}) : std::min(place, last)];
        const i64 off = std::abs(2 * (unit.sum - near.sum) - gap);
        if (off < best.off) best = {off, items(groups_[top], unit), items(groups_[other], near)};
      }
    }
  }

  // All units of `size` of the group's items, ascending; of equal sums in the order of their places.
  void units(const std::vector<int>& group, int size, std::vector<Unit>& into) const {
    into.clear();
    const int count = static_cast<int>(group.size());
    if (size == 0) into.push_back({0, -1, -1});
    if (size == 1) {
      for (int a = 0; a < count; ++a) into.push_back({costs_[group[a]], a, a});
    }
    if (size == 2) {
      for (int a = 0; a < count; ++a) {
        for (int b = a + 1; b < count; ++b) into.push_back({costs_[group[a]] + costs_[group[b]], a, b});
      }
      std::stable_sort(into.begin(), into.end(), [](const Unit& one, const Unit& other) { return one.sum < other.sum; });
    }
  }

  static std::vector<int> items(const std::vector<int>& group, const Unit& unit) {
    if (unit.a < 0) return {};
    return unit.a == unit.b ? std::vector<int>{group[unit.a]} : std::vector<int>{group[unit.a], group[unit.b]};
  }

  void move(int g, const std::vector<int>& less, const std::vector<int>& more) {
    auto& group = groups_[g];
    by_load_.erase(std::lower_bound(by_load_.begin(), by_load_.end(), std::pair{loads_[g], g}));
    for (int item : less) {
      group.erase(std::find(group.begin(), group.end(), item));
      loads_[g] -= costs_[item];
    }
    for (int item : more) {
      group.push_back(item);
      loads_[g] += costs_[item];
    }
    sort(group);
    const std::pair<i64, int> now{loads_[g], g};
    by_load_.insert(std::lower_bound(by_load_.begin(), by_load_.end(), now), now);
  }

  Groups groups_;
  const std::vector<i64>& costs_;
  bool equal_counts_;
  std::vector<i64> loads_;
  std::vector<std::pair<i64, int>> by_load_;  // (load, group), ascending
  std::vector<Unit> given_, taken_;
};

}  // namespace dynapipe

// Samples exchanged between micro-batches of two sides.
#pragma once

#include <array>

#include "state.hpp"

namespace dynapipe {

class Regrouping {
 public:
  Regrouping(Groups groups, const std::vector<i64>& encoder, const std::vector<i64>& decoder, const std::array<double, 6>& law,
             i64 most_tokens)
      : groups_(std::move(groups)), lengths_{&encoder, &decoder}, law_(law), most_tokens_(most_tokens) {
    for (const auto& group : groups_) {
      shapes_.push_back({longest(group, 0), longest(group, 1)});
      cost_.push_back(cost(static_cast<i64>(group.size()), shapes_.back()));
    }
    auto sorted = cost_;
    std::sort(sorted.begin(), sorted.end());
    for (double one : cost_) most_.push_back(std::max(one * kLonger, sorted[sorted.size() / 2]));
  }

  Groups after(i64 moves, std::uint64_t seed) && {
    Random random{seed};
    double energy = 0.0;
    for (double one : cost_) energy += one;
    double record = energy;
    const double allowance = energy / kAllowance;
    const std::uint64_t count = groups_.size();
    for (i64 move = 0; move < moves; ++move) {
      const std::uint64_t choice = random.next(), places = random.next();
      const auto a = static_cast<int>(choice % count), b = static_cast<int>((choice >> 16) % count);
      const bool exchange = choice >> 34 & 1;
      auto &mine = groups_[a], &theirs = groups_[b];
      if (a == b || (mine.size() < 2 && !exchange)) continue;
      const int side = choice >> 32 & 1;
      std::size_t i = places % mine.size();
      if (choice >> 35 & 3) {
        i = 0;
        for (std::size_t at = 1; at < mine.size(); ++at) {
          if ((*lengths_[side])[mine[at]] > (*lengths_[side])[mine[i]]) i = at;
        }
      }
      const std::size_t j = (places >> 32) % theirs.size();
      const int given = mine[i], taken = exchange ? theirs[j] : kNone;
      const Shape mine_now = without(a, given, taken), theirs_now = without(b, taken, given);
      const i64 gone = exchange ? 0 : 1;
      const i64 mine_rows = static_cast<i64>(mine.size()) - gone, theirs_rows = static_cast<i64>(theirs.size()) + gone;
      const double mine_cost = cost(mine_rows, mine_now), theirs_cost = cost(theirs_rows, theirs_now);
      const double changed = energy + (mine_cost + theirs_cost - cost_[a] - cost_[b]);
      if (!possible(a, mine_rows, mine_now, mine_cost) || !possible(b, theirs_rows, theirs_now, theirs_cost)) continue;
      if (changed > record + allowance * static_cast<double>(moves - move) / static_cast<double>(moves)) continue;
      if (exchange) {
        std::swap(mine[i], theirs[j]);
      } else {
        theirs.push_back(given);
        mine[i] = mine.back();
        mine.pop_back();
      }
      shapes_[a] = mine_now;
      shapes_[b] = theirs_now;
      cost_[a] = mine_cost;
      cost_[b] = theirs_cost;
      energy = changed;
      record = std::min(record, changed);
    }
    return std::move(groups_);
  }

 private:
  struct Shape {
    i64 side[2];
  };
  static constexpr int kNone = -1;
  static constexpr double kLonger = 1.1, kAllowance = 2000;

  i64 longest(const std::vector<int>& group, int side) const {
    i64 most = 0;
    for (int item : group) most = std::max(most, (*lengths_[side])[item]);
    return most;
  }

  // The group's shape without one item, with another (each may be kNone).
  Shape without(int group, int gone, int come) const {
    Shape shape = shapes_[group];
    for (int side = 0; side < 2; ++side) {
      const auto& length = *lengths_[side];
      i64& longest = shape.side[side];
      if (gone != kNone && length[gone] == longest) {
        longest = 0;
        for (int item : groups_[group]) longest = item == gone ? longest : std::max(longest, length[item]);
      }
      if (come != kNone) longest = std::max(longest, length[come]);
    }
    return shape;
  }

  bool possible(int group, i64 rows, const Shape& shape, double cost) const {
    return cost <= std::max(cost_[group], most_[group]) && rows * (shape.side[0] + shape.side[1]) <= most_tokens_;
  }

  double cost(i64 rows, const Shape& shape) const {
    const auto e = static_cast<double>(shape.side[0]), d = static_cast<double>(shape.side[1]);
    return (law_[1] * e + law_[2] * d + law_[3] * (e * e) + law_[4] * (d * d) + law_[5] * (e * d)) * static_cast<double>(rows) + law_[0];
  }

  Groups groups_;
  const std::vector<i64>* lengths_[2];
  std::array<double, 6> law_;
  std::vector<Shape> shapes_;
  std::vector<double> cost_, most_;
  i64 most_tokens_;
};

}  // namespace dynapipe

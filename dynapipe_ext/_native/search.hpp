// Joint search: which replica runs each micro-batch, in what order, under which recomputation, dispatched by which rule.
//
// Twin: schedules/search.py.
#pragma once

#include <utility>

#include "pipeline.hpp"

namespace dynapipe {

constexpr i64 kInfeasible = i64{1} << 50;

struct Random {  // splitmix64 (Steele, Lea and Flood 2014)
  std::uint64_t state;
  std::uint64_t next() {
    state += 0x9E3779B97F4A7C15ull;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  int below(std::size_t n) { return static_cast<int>(next() % n); }
};

// Costs of every micro-batch under every kind of recomputation: tables [kind][stage][micro-batch].
struct Costs {
  int kinds = 0, stages = 0, count = 0;
  std::vector<i64> forward, gradient, weight, stored, working;
  std::vector<i64> transfer;  // [boundary][micro-batch]
};

struct State {
  std::vector<std::vector<int>> groups;  // [replica]: micro-batches in injection order
  std::vector<int> kind;                 // [micro-batch]
  std::vector<int> rule;                 // [replica]
  std::vector<i64> makespan;             // [replica]

  std::pair<i64, i64> value() const {
    i64 most = 0, sum = 0;
    for (i64 one : makespan) {
      most = std::max(most, one);
      sum += one;
    }
    return {most, sum};
  }
};

class Search {
 public:
  Search(Costs costs, Pipeline frame, std::vector<Rule> rules) : costs_(std::move(costs)), pipe_(std::move(frame)), rules_(std::move(rules)) {}

  i64 run(const std::vector<int>& order, const std::vector<int>& kind, int rule, i64 give_up, std::vector<std::vector<Chosen>>* orders) {
    if (order.empty()) {
      if (orders) orders->assign(pipe_.ranks, {});
      return 0;
    }
    const int n = static_cast<int>(order.size()), num = costs_.count;
    pipe_.count = n;
    for (auto* table : {&pipe_.forward, &pipe_.gradient, &pipe_.weight, &pipe_.stored, &pipe_.working}) {
      table->resize(static_cast<std::size_t>(costs_.stages) * n);
    }
    pipe_.transfer.resize(static_cast<std::size_t>(std::max(0, costs_.stages - 1)) * n);
    for (int s = 0; s < costs_.stages; ++s) {
      for (int p = 0; p < n; ++p) {
        const int m = order[p];
        const std::size_t from = (static_cast<std::size_t>(kind[m]) * costs_.stages + s) * num + m, to = static_cast<std::size_t>(s) * n + p;
        if (costs_.forward[from] >= kInfeasible) return kNever;
        pipe_.forward[to] = costs_.forward[from];
        pipe_.gradient[to] = costs_.gradient[from];
        pipe_.weight[to] = costs_.weight[from];
        pipe_.stored[to] = costs_.stored[from];
        pipe_.working[to] = costs_.working[from];
        if (s + 1 < costs_.stages) pipe_.transfer[to] = costs_.transfer[static_cast<std::size_t>(s) * num + m];
      }
    }
    return dispatcher_.run(pipe_, rules_[rule], give_up, orders);
  }

  // Best of all rules over some orders of one replica; the state's order stays where nothing runs.
  void settle(State& state, int d, const std::vector<std::vector<int>>& starts) {
    state.makespan[d] = kNever;
    for (const auto& order : starts) {
      for (int rule = 0; rule < static_cast<int>(rules_.size()); ++rule) {
        const i64 found = run(order, state.kind, rule, state.makespan[d], nullptr);
        if (found < state.makespan[d]) {
          state.makespan[d] = found;
          state.groups[d] = order;
          state.rule[d] = rule;
        }
      }
    }
  }

  // Record-to-record travel (Dueck 1993): a move may cost up to an allowance that shrinks to nothing.
  State improve(State state, i64 effort, std::uint64_t seed, bool equal_counts) {
    State best = state;
    Random random{seed};
    const int replicas = static_cast<int>(state.groups.size());
    for (i64 step = 0; step < effort; ++step) {
      State moved = state;
      int d = random.below(replicas);
      if (random.below(4)) {
        for (int e = 0; e < replicas; ++e) {
          if (state.makespan[e] > state.makespan[d]) d = e;
        }
      }
      auto& mine = moved.groups[d];
      const std::size_t n = mine.size();
      int other = -1;
      const int type = random.below(8);
      const std::uint64_t a = random.next(), b = random.next();
      if (n == 0) continue;
      if (type <= 1) {
        std::swap(mine[a % n], mine[b % n]);
      } else if (type <= 3) {
        const int m = mine[a % n];
        mine.erase(mine.begin() + a % n);
        mine.insert(mine.begin() + b % n, m);
      } else if (type == 4) {
        moved.rule[d] = static_cast<int>(a % rules_.size());
      } else if (type == 5) {
        moved.kind[mine[a % n]] = static_cast<int>(b % costs_.kinds);
      } else if (replicas > 1) {
        other = static_cast<int>(random.below(replicas - 1));
        other += other >= d;
        auto& theirs = moved.groups[other];
        if (type == 6 && !equal_counts && n > 1) {
          const int m = mine[a % n];
          mine.erase(mine.begin() + a % n);
          theirs.insert(theirs.begin() + b % (theirs.size() + 1), m);
        } else if (!theirs.empty()) {
          std::swap(mine[a % n], theirs[b % theirs.size()]);
        }
      }
      if (moved.groups == state.groups && moved.kind == state.kind && moved.rule == state.rule) continue;
      const i64 record = best.value().first;
      const i64 allowed = std::max(record + record / 256 * (effort - step) / effort, record);
      moved.makespan[d] = run(moved.groups[d], moved.kind, moved.rule[d], allowed + 1, nullptr);
      if (moved.makespan[d] > allowed) continue;
      if (other >= 0) {
        moved.makespan[other] = run(moved.groups[other], moved.kind, moved.rule[other], allowed + 1, nullptr);
        if (moved.makespan[other] > allowed) continue;
      }
      if (moved.value().first > allowed) continue;
      state = std::move(moved);
      if (state.value() < best.value()) best = state;
    }
    return best;
  }

 private:
  Costs costs_;
  Pipeline pipe_;
  std::vector<Rule> rules_;
  Dispatcher dispatcher_;
};

}  // namespace dynapipe

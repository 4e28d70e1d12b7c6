// Costs of one replica's micro-batches in injection order, and the dispatch rules that order its actions.
//
// Twin: schedules/dispatch.py. Both must make the same choices in the same order: plans have the same bytes with either.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dynapipe {

using i64 = std::int64_t;
constexpr i64 kNever = i64{1} << 60;
constexpr i64 kUnknown = -1;

// Tables are [stage][position]; a position is a place in the injection order.
struct Pipeline {
  int stages = 0, ranks = 0, count = 0;
  bool split = false;                           // `gradient` is I alone and `weight` follows; else it is the whole B
  bool working_in_backward = true;              // working bytes are needed in B and I, too
  std::vector<int> stage_rank;                  // [stage]
  std::vector<std::vector<int>> rank_stages;    // [rank], ascending
  std::vector<i64> free_bytes;                  // [rank]: limit - static
  std::vector<i64> forward, gradient, weight, stored, working, transfer;  // transfer: [stage - 1 boundary][position]

  i64 at(const std::vector<i64>& table, int stage, int position) const { return table[stage * count + position]; }
};

// How a rank that is free chooses among what is ready.
struct Rule {
  int extra = 0;         // stage s holds at most S - s + extra micro-batches; kNoCap: as many as memory allows
  bool alternate = true; // after a backward a forward goes first: 1F1B's rhythm
  int patience = 0;      // a W may delay the next known arrival by up to patience / 4 of its own time
  int most_pending = 0;  // pending W's above this many go first
};
constexpr int kNoCap = 1 << 20;

enum class Kind : std::uint8_t { kForward, kGradient, kWeight };

struct Chosen {
  int stage, position;
  Kind kind;
};

// Runs a rule; buffers are kept between runs.
class Dispatcher {
 public:
  // Makespan, or kNever once it is known to be `give_up` or more, or if memory blocks it. `orders`, if given, receives
  // each rank's actions.
  i64 run(const Pipeline& p, const Rule& rule, i64 give_up, std::vector<std::vector<Chosen>>* orders) {
    reset(p, orders);
    const int actions_each = p.split ? 3 : 2;
    int left = p.stages * p.count * actions_each;
    i64 makespan = 0;
    while (left > 0) {
      int rank = 0;
      for (int r = 1; r < p.ranks; ++r) {
        if (wake_[r] < wake_[rank]) rank = r;
      }
      const i64 now = wake_[rank];
      if (now >= kNever) return kNever;
      i64 next = kNever;
      Chosen chosen{};
      if (!choose(p, rule, rank, now, &chosen, &next)) {
        wake_[rank] = next;
        continue;
      }
      const i64 end = start(p, rule, rank, now, chosen);
      if (orders) (*orders)[rank].push_back(chosen);
      left_work_[rank] -= end - now;
      if (end + left_work_[rank] >= give_up) return kNever;
      makespan = std::max(makespan, end);
      wake_[rank] = end;
      free_at_[rank] = end;
      --left;
    }
    return makespan;
  }

 private:
  void reset(const Pipeline& p, std::vector<std::vector<Chosen>>* orders) {
    const std::size_t cells = static_cast<std::size_t>(p.stages) * p.count;
    arrival_.assign(cells, kUnknown);
    gradient_arrival_.assign(cells, kUnknown);
    for (int m = 0; m < p.count; ++m) arrival_[m] = 0;
    entered_.assign(p.stages, 0);
    in_flight_.assign(p.stages, 0);
    first_inside_.assign(p.stages, 0);
    gone_.assign(cells, 0);
    queued_.resize(p.stages);
    for (auto& queue : queued_) queue.clear();
    pending_.resize(p.ranks);
    pending_head_.assign(p.ranks, 0);
    for (auto& queue : pending_) queue.clear();
    held_.assign(p.ranks, 0);
    pending_bytes_.assign(p.ranks, 0);
    wants_forward_.assign(p.ranks, 0);
    wake_.assign(p.ranks, kNever);
    free_at_.assign(p.ranks, 0);
    left_work_.assign(p.ranks, 0);
    wake_[p.stage_rank[0]] = 0;
    for (int s = 0; s < p.stages; ++s) {
      i64 sum = 0;
      for (int m = 0; m < p.count; ++m) {
        sum += p.at(p.forward, s, m) + p.at(p.gradient, s, m) + (p.split ? p.at(p.weight, s, m) : 0);
      }
      left_work_[p.stage_rank[s]] += sum;
    }
    if (orders) orders->assign(p.ranks, {});
  }

  // Whether the rank's memory takes position m on stage s now. `only_pending` tells that it would after pending W's.
  bool admits(const Pipeline& p, int rank, int s, int m, bool* only_pending) const {
    const i64 stored = p.at(p.stored, s, m);
    i64 most_working = p.at(p.working, s, m);
    if (p.working_in_backward) {
      for (int t : p.rank_stages[rank]) {
        for (int q = first_inside_[t]; q < entered_[t]; ++q) {
          if (!gone_[t * p.count + q]) most_working = std::max(most_working, p.at(p.working, t, q));
        }
      }
    }
    i64 needed = held_[rank] + stored + most_working;
    const i64 room = p.free_bytes[rank];
    if (needed - pending_bytes_[rank] > room) return false;
    if (p.rank_stages[rank].size() > 1 && !safe(p, rank, s, m)) return false;
    if (needed > room) {
      *only_pending = true;
      return false;
    }
    return true;
  }

  // Several stages on a rank: after this admission the micro-batches in flight can still complete, oldest first.
  bool safe(const Pipeline& p, int rank, int s, int m) const {
    const int first_stage = p.rank_stages[rank].front();
    i64 held = held_[rank] - pending_bytes_[rank] + p.at(p.stored, s, m);
    const int oldest = first_inside_[first_stage];
    const int newest = std::max(entered_[first_stage], s == first_stage ? m + 1 : 0);
    for (int q = oldest; q < newest; ++q) {
      i64 mine = 0, missing = 0, working = 0;
      for (int t : p.rank_stages[rank]) {
        const bool inside = (q < entered_[t] || (t == s && q == m)) && !gone_[t * p.count + q];
        if (inside) {
          mine += p.at(p.stored, t, q);
          if (p.working_in_backward) working = std::max(working, p.at(p.working, t, q));
        } else if (q >= entered_[t]) {
          missing += p.at(p.stored, t, q);
          working = std::max(working, p.at(p.working, t, q));
        }
      }
      if (held + missing + working > p.free_bytes[rank]) return false;
      held -= mine;
    }
    return true;
  }

  // The action to start now; false with the next time to look at (`next`) where there is none.
  bool choose(const Pipeline& p, const Rule& rule, int rank, i64 now, Chosen* chosen, i64* next) {
    auto& pending = pending_[rank];
    const int num_pending = static_cast<int>(pending.size()) - pending_head_[rank];
    if (num_pending > rule.most_pending) return take_weight(rank, chosen);
    int gradient_stage = -1, gradient_position = 1 << 30;
    int forward_stage = -1;
    bool after_weights = false;
    const auto& mine = p.rank_stages[rank];
    for (auto it = mine.rbegin(); it != mine.rend(); ++it) {
      const int s = *it;
      for (int m : queued_[s]) {
        const i64 at = gradient_arrival_[s * p.count + m];
        if (at > now) {
          *next = std::min(*next, at);
        } else if (m < gradient_position) {
          gradient_stage = s;
          gradient_position = m;
        }
      }
      const int m = entered_[s];
      if (m < p.count && forward_stage < 0) {
        const i64 at = arrival_[s * p.count + m];
        const bool capped = rule.extra < kNoCap && in_flight_[s] >= std::max(1, p.stages - s + rule.extra);
        if (at != kUnknown && !capped) {
          bool blocked = false;
          if (at > now) {
            *next = std::min(*next, at);
          } else if (admits(p, rank, s, m, &blocked)) {
            forward_stage = s;
          } else if (blocked) {
            after_weights = true;
          }
        }
      }
    }
    const bool has_gradient = gradient_stage >= 0;
    if (has_gradient && !(wants_forward_[rank] && (forward_stage >= 0 || after_weights))) {
      *chosen = {gradient_stage, gradient_position, Kind::kGradient};
      return true;
    }
    if (forward_stage >= 0) {
      *chosen = {forward_stage, entered_[forward_stage], Kind::kForward};
      return true;
    }
    if (after_weights) return take_weight(rank, chosen);
    if (num_pending > 0) {
      const Chosen& front = pending[pending_head_[rank]];
      const i64 duration = p.at(p.weight, front.stage, front.position);
      if (*next >= kNever || (now + duration - *next) * 4 <= duration * rule.patience) return take_weight(rank, chosen);
    }
    return false;
  }

  bool take_weight(int rank, Chosen* chosen) {
    *chosen = pending_[rank][pending_head_[rank]++];
    return true;
  }

  i64 start(const Pipeline& p, const Rule& rule, int rank, i64 now, const Chosen& c) {
    const int s = c.stage, m = c.position, cell = s * p.count + m;
    i64 end = now;
    switch (c.kind) {
      case Kind::kForward:
        end += p.forward[cell];
        held_[rank] += p.stored[cell];
        ++entered_[s];
        ++in_flight_[s];
        if (s + 1 == p.stages) {
          gradient_arrival_[cell] = end;
          queued_[s].push_back(m);
        } else {
          arrive(p, s + 1, m, end + hop(p, s, s + 1, m), arrival_);
        }
        wants_forward_[rank] = 0;
        break;
      case Kind::kGradient: {
        end += p.gradient[cell];
        auto& queue = queued_[s];
        queue.erase(std::find(queue.begin(), queue.end(), m));
        gone_[cell] = 1;
        --in_flight_[s];
        while (first_inside_[s] < entered_[s] && gone_[s * p.count + first_inside_[s]]) ++first_inside_[s];
        if (p.split) {
          pending_[rank].push_back({s, m, Kind::kWeight});
          pending_bytes_[rank] += p.stored[cell];
        } else {
          held_[rank] -= p.stored[cell];
        }
        if (s > 0) {
          queued_[s - 1].push_back(m);
          arrive(p, s - 1, m, end + hop(p, s - 1, s, m), gradient_arrival_);
        }
        wants_forward_[rank] = rule.alternate;
        break;
      }
      case Kind::kWeight:
        end += p.weight[cell];
        held_[rank] -= p.stored[cell];
        pending_bytes_[rank] -= p.stored[cell];
        break;
    }
    return end;
  }

  static i64 hop(const Pipeline& p, int low, int high, int m) {
    return p.stage_rank[low] == p.stage_rank[high] ? 0 : p.at(p.transfer, low, m);
  }

  void arrive(const Pipeline& p, int s, int m, i64 at, std::vector<i64>& table) {
    table[s * p.count + m] = at;
    const int rank = p.stage_rank[s];
    wake_[rank] = std::min(wake_[rank], std::max(at, free_at_[rank]));
  }

  std::vector<i64> arrival_, gradient_arrival_, held_, pending_bytes_, wake_, free_at_, left_work_;
  std::vector<int> entered_, in_flight_, first_inside_, pending_head_;
  std::vector<char> gone_, wants_forward_;
  std::vector<std::vector<int>> queued_;
  std::vector<std::vector<Chosen>> pending_;
};

}  // namespace dynapipe
